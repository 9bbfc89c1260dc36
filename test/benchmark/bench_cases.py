"""Made-up runs for tests of the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from coserve_bench.plan import RunKey
from coserve_bench.run_record import OfflineRecord, RunRecord
from sglang_coserve.metrics import RequestTimeline, SloTargets

__all__ = ["online", "record"]

WINDOW_S = 10.0


def online(ttft_s: float, gap_s: float, arrival_s: float = 0.0, tokens: int = 3) -> RequestTimeline:
    """A request of 10 prompt tokens with equal gaps between its output tokens."""
    first_s = arrival_s + ttft_s
    times_s = tuple(first_s + place * gap_s for place in range(tokens))
    return RequestTimeline(f"at-{arrival_s}", arrival_s, times_s, prompt_tokens=10)


def record(
    system: str,
    timelines: Sequence[RequestTimeline],
    *,
    repeat: int = 1,
    load: float = 0.5,
    slo: str = "",
    targets: SloTargets | None = None,
    offline: Sequence[RequestTimeline] | None = None,
) -> RunRecord:
    """A run with a window of 10 s."""
    return RunRecord(
        RunKey(repeat, load, system, slo),
        targets,
        WINDOW_S,
        tuple(timelines),
        None if offline is None else OfflineRecord.of(offline, WINDOW_S),
        provenance={"seed": 1},
    )
