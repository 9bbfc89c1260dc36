"""What a chaos run has shown, as figures with targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chaos_bench.batches import LineCounts
from chaos_bench.figures import Figure, Interval, Observation
from chaos_bench.servers import Servers

_MOST_STALL_MS: Final = 100.0
_BREAK_S: Final = 1.0
"""Within it whoever waits hears that a connection broke."""

_QUEUE_FULL: Final = "The request queue is full"
"""What SGLang answers beyond ``--max-queued-requests``, which is an ordinary outcome."""

_MOST_EXAMPLES: Final = 20
_SLOWEST_TOLD: Final = 10
_OURS: Final = frozenset({"ping", "health", "stream", "gap", "batch"})


@dataclass(frozen=True, slots=True)
class Verdict:
    """The figures, and a few of the observations that spoil them."""

    figures: list[Figure]
    examples: list[str]


def verdict(servers: Servers, lines: LineCounts, seen: Sequence[Observation]) -> Verdict:
    """Judge a run."""
    requests = of_requests(seen, servers.outages, servers.full_disk, servers.gateway_outages)
    figures = [
        Figure("injuries", servers.injuries.total()),
        *(Figure(name, count) for name, count in servers.injuries.items()),
        Figure("ends of a server that nobody asked for", servers.unexpected_ends, at_most=0),
        Figure(
            "servers that did not end or start as they should", len(servers.failures), at_most=0
        ),
        *lines.figures(),
        # A gateway has other engines.
        Figure("lines given up", lines.given_up, at_most=0 if servers.is_fleet else None),
        *requests.figures,
    ]
    examples = [*servers.failures, *lines.examples[:_MOST_EXAMPLES], *requests.examples]
    return Verdict(figures, examples)


def of_requests(
    seen: Sequence[Observation],
    outages: Sequence[Interval],
    full_disk: Sequence[Interval] = (),
    gateway_outages: Sequence[Interval] = (),
) -> Verdict:
    """Judge what was seen of requests. O(observations × outages).

    What an outage excuses was under way in it and ended soon after, if not in it. An outage of the
    gateway excuses calls of the Batch API alone.
    """

    of_batches = (*outages, *gateway_outages)

    def is_excused(each: Observation) -> bool:
        return any(
            outage.overlaps(each.start_s, each.end_s) and each.end_s <= outage.end_s + _BREAK_S
            for outage in (of_batches if each.kind == "batch" else outages)
        )

    judged = [each for each in seen if not is_excused(each)]
    streams = [each for each in seen if each.kind == "stream"]
    failed = [each for each in judged if each.kind == "stream" and each.status != 200]
    otherwise = [each for each in failed if not _is_refused(each)]
    errors = [
        each
        for each in judged
        if each.status >= 500 and not _is_refused(each) and not _is_full(each, full_disk)
    ]
    silent = [each for each in judged if each.status == 0 and each.kind in ("ping", "health")]
    failures = sum(each.status != 200 for each in streams)
    figures = [
        Figure("online requests", len(streams)),
        Figure("that failed in an outage", failures - len(failed)),
        Figure("that failed otherwise", len(otherwise), at_most=0),
        Figure("online answers different", sum(e.is_different for e in streams), at_most=0),
        Figure("hostile requests", sum(each.kind not in _OURS for each in seen)),
        Figure("requests refused by a full queue", sum(map(_is_refused, seen))),
        Figure("answers of 5xx", len(errors), at_most=0),
        Figure("probes without an answer", len(silent), at_most=0),
    ]
    pings: list[str] = []
    for kind, target in (("ping", _MOST_STALL_MS), ("health", None), ("gap", None)):
        if of_kind := sorted((o for o in judged if o.kind == kind), key=_duration_ms):
            p99_ms = _duration_ms(of_kind[min(len(of_kind) - 1, int(len(of_kind) * 0.99))])
            figures.append(Figure(f"P99 of {kind}", p99_ms, "ms"))
            longest_ms = _duration_ms(of_kind[-1])
            figures.append(Figure(f"longest {kind}", longest_ms, "ms", at_most=target))
        if of_kind and kind == "ping":
            busy_ms = max(_duration_ms(o) - o.cpu_wait_ms for o in of_kind)
            figures.append(Figure("longest ping without waits for a CPU", busy_ms, "ms"))
            slowest = of_kind[: -1 - _SLOWEST_TOLD : -1]
            pings = [f"ping of {_duration_ms(o):.0f} ms: {o.detail}" for o in slowest]
    causes = Counter(
        f"{each.kind}: {each.status} {each.detail[:200]}" for each in {*errors, *silent, *otherwise}
    )
    examples = [f"{count} × {text}" for text, count in causes.most_common(_MOST_EXAMPLES)]
    return Verdict(figures, examples + pings)


def _duration_ms(seen: Observation) -> float:
    return (seen.end_s - seen.start_s) * 1e3


def _is_refused(each: Observation) -> bool:
    return each.status == 503 and _QUEUE_FULL in each.detail


def _is_full(each: Observation, full_disk: Sequence[Interval]) -> bool:
    """True for what a full or failing disk excuses: 507 of calls that have to write."""
    return each.status == 507 and any(i.overlaps(each.start_s, each.end_s) for i in full_disk)
