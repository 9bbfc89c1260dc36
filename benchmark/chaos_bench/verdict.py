"""What a chaos run has shown, as figures with targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chaos_bench.batch_load import LineCounts
from chaos_bench.observation import Interval, Observation
from common.figures import Figure, all_met

__all__ = ["Verdict", "verdict"]

_MOST_STALL_MS: Final = 100.0
_SETTLE_S: Final = 1.0
"""After an outage, before answers are judged: connections that broke are opened again."""

_QUEUE_FULL: Final = "The request queue is full"
"""What SGLang answers beyond ``--max-queued-requests``, which is an ordinary outcome."""

_MOST_EXAMPLES: Final = 20
_MOST_STALLS: Final = 20
_MOST_NAMES: Final = 6


@dataclass(frozen=True, slots=True)
class Verdict:
    """The figures, and a few of the observations that spoil them."""

    figures: list[Figure]
    examples: list[str]
    stalls: list[str]
    """The longest answers of a route without work, and what the server had to do meanwhile."""

    @property
    def is_met(self) -> bool:
        """True when every target is met."""
        return all_met(self.figures)


def verdict(
    seen: Sequence[Observation],
    lines: LineCounts,
    *,
    outages: Sequence[Interval],
    full_disk: Sequence[Interval],
    injuries: int,
    unexpected_ends: int,
) -> Verdict:
    """Judge what was seen. O(observations × outages)."""
    judged = [
        each
        for each in seen
        if not any(
            Interval(outage.start_s, outage.end_s + _SETTLE_S).overlaps(each.start_s, each.end_s)
            for outage in outages
        )
    ]
    errors = [
        each
        for each in judged
        if each.status >= 500 and not _is_refused(each) and not _is_full(each, full_disk)
    ]
    broken = [each for each in judged if each.status == 0 and each.kind in _PROBES]
    different = [each for each in seen if each.is_different]
    figures = [
        Figure("injuries", "", (injuries,)),
        Figure("ends of the server that nobody asked for", "", (unexpected_ends,), at_most=0),
        *lines.figures(),
        Figure("lines given up after two ends of the engine", "", (lines.given_up,)),
        Figure("online streams", "", (sum(each.kind == "stream" for each in judged),)),
        Figure("online answers different", "", (len(different),), at_most=0),
        Figure("hostile requests", "", (sum(each.kind not in _OURS for each in seen),)),
        Figure("requests refused by a full queue", "", (sum(map(_is_refused, seen)),)),
        Figure("answers of 5xx", "", (len(errors),), at_most=0),
        Figure("probes without an answer", "", (len(broken),), at_most=0),
    ]
    for kind, target in (
        ("ping", _MOST_STALL_MS),
        ("control", None),
        ("health", None),
        ("gap", None),
    ):
        times_ms = sorted((o.end_s - o.start_s) * 1e3 for o in judged if o.kind == kind)
        if times_ms:
            p99 = times_ms[min(len(times_ms) - 1, int(len(times_ms) * 0.99))]
            figures.append(Figure(f"P99 of {kind}", "ms", (p99,)))
            figures.append(Figure(f"longest {kind}", "ms", (times_ms[-1],), at_most=target))
    causes = Counter(
        f"{each.kind}: {each.status} {each.detail[:200]}" for each in [*errors, *broken]
    )
    examples = [f"{count} × {text}" for text, count in causes.most_common(_MOST_EXAMPLES)]
    return Verdict(
        figures, [*examples, *lines.examples[:_MOST_EXAMPLES]], _stalls(judged, seen, outages)
    )


_PROBES: Final = frozenset({"ping", "health", "stream"})
_OURS: Final = _PROBES | {"gap", "batch", "control"}


def _stalls(
    judged: Sequence[Observation], seen: Sequence[Observation], outages: Sequence[Interval]
) -> list[str]:
    pings = [each for each in judged if each.kind == "ping"]
    stalls = []
    for ping in sorted(pings, key=lambda each: each.start_s - each.end_s)[:_MOST_STALLS]:
        ends_s = [outage.end_s for outage in outages if outage.end_s <= ping.start_s]
        since = f"{ping.start_s - max(ends_s):.0f} s after a start" if ends_s else "no start yet"
        span = Interval(ping.start_s, ping.end_s)
        beside = Counter(
            each.kind
            for each in seen
            if each.kind not in _PROBES | {"gap", "control"}
            and span.overlaps(each.start_s, each.end_s)
        )
        names = ", ".join(f"{count} × {kind}" for kind, count in beside.most_common(_MOST_NAMES))
        stalls.append(f"{(ping.end_s - ping.start_s) * 1e3:.0f} ms, {since}: {names}")
    return stalls


def _is_refused(each: Observation) -> bool:
    return each.status == 503 and _QUEUE_FULL in each.detail


def _is_full(each: Observation, full_disk: Sequence[Interval]) -> bool:
    """True for what a full or failing disk excuses: 507 of calls that have to write."""
    return each.status == 507 and any(i.overlaps(each.start_s, each.end_s) for i in full_disk)
