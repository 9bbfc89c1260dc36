"""What a chaos run has shown, as figures with targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chaos_bench.batch_load import LineCounts
from chaos_bench.figures import Figure, Interval, Observation

_MOST_STALL_MS: Final = 100.0
_SETTLE_S: Final = 1.0
"""After an outage, before answers are judged: connections that broke are opened again."""

_BREAK_S: Final = 1.0
"""Within it a router has passed on that a stream broke."""

_QUEUE_FULL: Final = "The request queue is full"
"""What SGLang answers beyond ``--max-queued-requests``, which is an ordinary outcome."""

_MOST_EXAMPLES: Final = 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """The figures, and a few of the observations that spoil them."""

    figures: list[Figure]
    examples: list[str]


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
        Figure("injuries", injuries),
        Figure("ends of the server that nobody asked for", unexpected_ends, at_most=0),
        *lines.figures(),
        Figure("lines given up after two ends of the engine", lines.given_up),
        Figure("online streams", sum(each.kind == "stream" for each in judged)),
        Figure("online answers different", len(different), at_most=0),
        Figure("hostile requests", sum(each.kind not in _OURS for each in seen)),
        Figure("requests refused by a full queue", sum(map(_is_refused, seen))),
        Figure("answers of 5xx", len(errors), at_most=0),
        Figure("probes without an answer", len(broken), at_most=0),
    ]
    for kind, target in (("ping", _MOST_STALL_MS), ("health", None), ("gap", None)):
        times_ms = sorted((o.end_s - o.start_s) * 1e3 for o in judged if o.kind == kind)
        if times_ms:
            p99 = times_ms[min(len(times_ms) - 1, int(len(times_ms) * 0.99))]
            figures.append(Figure(f"P99 of {kind}", p99, "ms"))
            figures.append(Figure(f"longest {kind}", times_ms[-1], "ms", at_most=target))
    causes = Counter(
        f"{each.kind}: {each.status} {each.detail[:200]}" for each in [*errors, *broken]
    )
    examples = [f"{count} × {text}" for text, count in causes.most_common(_MOST_EXAMPLES)]
    return Verdict(figures, [*examples, *lines.examples[:_MOST_EXAMPLES]])


_PROBES: Final = frozenset({"ping", "health", "stream"})
_OURS: Final = _PROBES | {"gap", "batch"}


def online_verdict(seen: Sequence[Observation], kills: Sequence[Interval]) -> Verdict:
    """Judge online requests that were sent through a router; engines were killed in ``kills``.

    One failed with an engine if it was under way when one was killed and ended soon after; nobody
    says which engine had it.
    """
    streams = [each for each in seen if each.kind == "stream"]
    failed = [each for each in streams if each.status != 200]
    otherwise = [
        each
        for each in failed
        if not any(
            kill.overlaps(each.start_s, each.end_s) and each.end_s <= kill.end_s + _BREAK_S
            for kill in kills
        )
    ]
    different = sum(each.is_different for each in streams)
    figures = [
        Figure("online requests", len(streams)),
        Figure("that failed with a killed engine", len(failed) - len(otherwise)),
        Figure("that failed otherwise", len(otherwise), at_most=0),
        Figure("online answers different", different, at_most=0),
    ]
    examples = [
        f"online request after {each.end_s - each.start_s:.1f} s: {each.status} {each.detail}"
        for each in otherwise
    ]
    return Verdict(figures, examples)


def _is_refused(each: Observation) -> bool:
    return each.status == 503 and _QUEUE_FULL in each.detail


def _is_full(each: Observation, full_disk: Sequence[Interval]) -> bool:
    """True for what a full or failing disk excuses: 507 of calls that have to write."""
    return each.status == 507 and any(i.overlaps(each.start_s, each.end_s) for i in full_disk)
