"""When a line is tried again, given up, and when the server is."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import pytest

from sglang_coserve.errors import ServerGoneError
from sglang_coserve.lines.backend import FailureKind, LineResult
from sglang_coserve.lines.serve_line import EngineHealth, LineRetries, RetryPolicy, retry_after_s

POLICY = RetryPolicy(retry_for_s=300.0, max_attempts=3, first_delay_s=1.0, max_delay_s=8.0)
UNREACHABLE = LineResult.unserved("unreachable", "connection refused", FailureKind.UNREACHABLE)
LOST = LineResult.unserved("connection_lost", "connection lost", FailureKind.LOST)


def unavailable(status: int, retry_after_s: float = 0.0) -> LineResult:
    return LineResult(status, "", {}, True, FailureKind.UNAVAILABLE, retry_after_s)


def retries_of(line: int, server: EngineHealth, seed: int = 0) -> LineRetries:
    return LineRetries(line, POLICY, server, random.Random(seed))


def test_delays_double_up_to_a_cap_with_jitter_below() -> None:
    retries = retries_of(1, EngineHealth())
    delays = [retries.failed(UNREACHABLE, now_s=0.0) for _ in range(6)]
    for delay_s, cap_s in zip(delays, [1, 2, 4, 8, 8, 8], strict=True):
        assert cap_s / 2 <= delay_s <= cap_s


def test_an_unreachable_server_is_given_up_after_the_limit_and_not_before() -> None:
    retries = retries_of(17, EngineHealth())
    now_s = 100.0
    retries.began(now_s)
    while now_s < 400.0:
        delay_s = retries.failed(UNREACHABLE, now_s)
        assert delay_s is not None
        now_s += delay_s
    assert now_s == 400.0, "the last attempt is at the limit exactly"
    with pytest.raises(ServerGoneError, match=r"300 s \(line 17: connection refused\)"):
        retries.failed(UNREACHABLE, now_s)


def test_answers_to_other_lines_keep_the_server_alive() -> None:
    server = EngineHealth()
    retries = retries_of(1, server)
    for now_s in (0.0, 200.0, 400.0, 600.0):
        retries.began(now_s)
        assert retries.failed(UNREACHABLE, now_s) is not None
        server.answered(now_s + 100.0)


def test_a_line_that_fails_first_after_a_long_silence_does_not_end_the_run() -> None:
    # The others are being generated: silence alone is no outage.
    retries = retries_of(1, EngineHealth())
    retries.began(10_000.0)
    assert retries.failed(UNREACHABLE, now_s=10_000.0) is not None


def test_a_server_that_held_the_line_for_long_was_there() -> None:
    retries = retries_of(1, EngineHealth())
    for began_s in (0.0, 1000.0, 2000.0):
        retries.began(began_s)
        assert retries.failed(LOST, began_s + 900.0) is not None


@pytest.mark.parametrize("kind", [FailureKind.LOST, FailureKind.TIMED_OUT])
def test_a_lost_line_is_to_blame_only_while_others_are_answered(kind: FailureKind) -> None:
    server = EngineHealth()
    failure = LineResult.unserved("lost", "lost", kind)
    alone = retries_of(1, server)
    for now_s in range(10):
        alone.began(now_s)
        assert alone.failed(failure, now_s) is not None
    among_others = retries_of(2, server)
    outcomes = []
    for now_s in range(3):
        among_others.began(now_s)
        server.answered(now_s)
        outcomes.append(among_others.failed(failure, now_s))
    assert outcomes[0] is not None
    assert outcomes[1] is not None
    assert outcomes[2] is None


def test_a_refusal_is_never_the_lines_fault() -> None:
    server = EngineHealth()
    retries = retries_of(1, server)
    for now_s in range(20):
        retries.began(now_s)
        server.answered(now_s)
        assert retries.failed(unavailable(503), now_s) is not None


def test_the_servers_wish_is_honoured_but_not_beyond_the_limit() -> None:
    retries = retries_of(1, EngineHealth())
    delay_s = retries.failed(unavailable(429, 20.0), 0.0)
    assert delay_s is not None
    assert retries.failed(unavailable(429, 9999.0), 50.0) == 250.0


def test_retry_after_in_both_forms() -> None:
    now = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
    assert retry_after_s("7", now) == 7.0
    assert retry_after_s("Thu, 01 Jan 2026 12:00:30 GMT", now) == 30.0
    assert retry_after_s("Thu, 01 Jan 2026 11:00:00 GMT", now) == 0.0
    far = "Thu, 01 Jan 99999999999999999999 12:00:00 GMT"
    for nothing in (None, "", "soon", "-5", "1.5", far):
        assert retry_after_s(nothing, now) is None
