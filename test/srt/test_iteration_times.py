"""Which batch the time between two passes belongs to."""

from __future__ import annotations

from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.srt.iteration_times import IterationTimes

A, B, C = (BatchStats.of([(tokens, 0)], []) for tokens in (1, 2, 3))


def test_without_overlap_a_pass_shows_the_time_of_its_own_batch() -> None:
    times = IterationTimes(is_overlapped=False)
    assert times.next_pass(10.0) is None
    times.launched(A)
    assert times.next_pass(10.5) == (A, 0.5)
    times.launched(None)
    assert times.next_pass(11.0) is None
    times.launched(B)
    assert times.next_pass(11.25) == (B, 0.25)


def test_with_overlap_it_shows_the_time_of_the_batch_before() -> None:
    times = IterationTimes(is_overlapped=True)
    assert times.next_pass(10.0) is None
    times.launched(A)
    assert times.next_pass(10.1) is None  # Nothing was running: launching A took that long.
    times.launched(B)
    assert times.next_pass(10.6) == (A, 0.5)
    times.launched(C)
    assert times.next_pass(11.0) == (B, 11.0 - 10.6)
    times.launched(None)
    assert times.next_pass(11.3) is None  # C's time is mixed with that of an unknown batch.


def test_an_empty_batch_takes_no_time() -> None:
    times = IterationTimes(is_overlapped=False)
    times.next_pass(1.0)
    times.launched(BatchStats())
    assert times.next_pass(2.0) is None
