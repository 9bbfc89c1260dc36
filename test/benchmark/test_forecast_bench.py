"""The calibration of forecasts: every batch is judged, and every line is served."""

from __future__ import annotations

from forecast_bench.batches import random_batches
from forecast_bench.calibration import calibrate, summary
from forecast_bench.last_lines import KINDS, serve
from sglang_coserve.workload import sample_path


def test_every_batch_is_judged_by_what_was_said_before() -> None:
    judged = calibrate(
        sample_path("online"),
        online_rate=1.0,
        mean_gap_s=15.0,
        until_s=60.0,
        seed=3,
        ttft_ms=1000.0,
        tpot_ms=50.0,
    )
    assert len(judged) == len(list(random_batches(3, 15.0, 60.0))) > 1
    for each in judged:
        assert 0 < each.finish.p05_s <= each.finish.p50_s <= each.finish.p95_s
        assert each.actual_s > 0
    figures = summary(judged)
    assert figures["batches"] == len(judged)
    assert 0 <= figures["by_hour"]["before_p95"] <= 1


def test_the_end_of_a_batch_is_part_of_it() -> None:
    for kind in KINDS:
        tail = serve(kind, 1, 60, 8, longest_first=True)
        assert 0 < tail.tail_s < tail.makespan_s
