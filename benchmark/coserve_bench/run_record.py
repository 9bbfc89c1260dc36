"""One run as it was measured, and as it lies on the disk."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from coserve_bench.machine_speed import MachineSpeed
from coserve_bench.plan import RunKey
from sglang_coserve.metrics import Outcome, RequestTimeline, SloTargets, Throughput, throughput

__all__ = ["OfflineRecord", "RunRecord", "read_record", "write_record"]


@dataclass(frozen=True, slots=True)
class OfflineRecord:
    """What became of the offline load within the window."""

    throughput: Throughput
    """Over (0, window], see docs/metrics.md."""

    tokens_by_s: tuple[int, ...]
    """Prompt and output tokens in each second of the window."""

    sent: int
    finished: int
    failed: int

    @classmethod
    def of(cls, timelines: Sequence[RequestTimeline], window_s: float) -> OfflineRecord:
        """Count what was delivered in (0, window]."""
        outcomes = [timeline.outcome for timeline in timelines]
        seconds = range(int(window_s))
        return cls(
            throughput(timelines, 0.0, window_s),
            tuple(round(throughput(timelines, s, s + 1).total_tokens_per_s) for s in seconds),
            sent=len(timelines),
            finished=outcomes.count(Outcome.FINISHED),
            failed=outcomes.count(Outcome.FAILED),
        )


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run. Times are seconds since the first online arrival."""

    key: RunKey
    targets: SloTargets | None
    """What the server was told; None for a system that takes no targets."""

    window_s: float
    """Online requests arrive in [0, window]; throughput is counted over it."""

    online: tuple[RequestTimeline, ...]
    offline: OfflineRecord | None
    provenance: Mapping[str, Any]
    """Machine, versions, flags and seed."""

    speed: MachineSpeed | None = None
    """Of the machine; None in records of earlier versions."""


def write_record(path: Path, record: RunRecord) -> None:
    """Write a record so that a reader sees all of it or nothing. 10 µs resolution."""
    targets = record.targets
    fields = {
        "key": asdict(record.key),
        "targets_s": None if targets is None else [targets.ttft_s, targets.tpot_s],
        "window_s": record.window_s,
        "online": [_timeline_to_list(timeline) for timeline in record.online],
        "offline": None if record.offline is None else asdict(record.offline),
        "provenance": record.provenance,
        "speed": None if record.speed is None else asdict(record.speed),
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(fields, separators=(",", ":")) + "\n")
    partial.replace(path)


def read_record(path: Path) -> RunRecord:
    """Read what ``write_record`` wrote."""
    fields = json.loads(path.read_text())
    targets = fields["targets_s"]
    return RunRecord(
        key=RunKey(**fields["key"]),
        targets=None if targets is None else SloTargets(*targets),
        window_s=fields["window_s"],
        online=tuple(_timeline(number, row) for number, row in enumerate(fields["online"])),
        offline=None if fields["offline"] is None else _offline(fields["offline"]),
        provenance=fields["provenance"],
        speed=MachineSpeed(**speed) if (speed := fields.get("speed")) else None,
    )


def _timeline_to_list(timeline: RequestTimeline) -> list[Any]:
    """Return [arrival s, outcome, prompt tokens, waits ms]: the TTFT, then every gap."""
    steps = (timeline.arrival_s, *timeline.token_times_s)
    # Rounded as times, not as gaps: the error of a sum of gaps stays that of one.
    ticks = [round(step * 1e5) for step in steps]
    waits_ms = [(b - a) / 100 for a, b in pairwise(ticks)]
    return [ticks[0] / 1e5, timeline.outcome.value, timeline.prompt_tokens, waits_ms]


def _timeline(number: int, row: Sequence[Any]) -> RequestTimeline:
    arrival_s, outcome, prompt_tokens, waits_ms = row
    ticks = accumulate((round(wait * 100) for wait in waits_ms), initial=round(arrival_s * 1e5))
    return RequestTimeline(
        rid=f"online-{number}",
        arrival_s=arrival_s,
        token_times_s=tuple(tick / 1e5 for tick in list(ticks)[1:]),
        prompt_tokens=prompt_tokens,
        outcome=Outcome(outcome),
    )


def _offline(fields: Mapping[str, Any]) -> OfflineRecord:
    return OfflineRecord(
        Throughput(**fields["throughput"]),
        tuple(fields["tokens_by_s"]),
        sent=fields["sent"],
        finished=fields["finished"],
        failed=fields["failed"],
    )
