"""The verdict on the promise to online users, as a level and a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

LEVELS: Final = ("ok", "unknown", "overloaded", "harmed")
"""Verdicts from good to bad."""

_LATENCIES: Final = {"ttft": "TTFT", "tpot": "TPOT", "tbt": "time between tokens"}
_NEEDED: Final = {"p50": 2, "p90": 10, "p99": 100}
"""Least number of values for a percentile that is not just their maximum."""

_LEAST_FOUND: Final = 0.9
"""Share of the tokens cached alone below which conversations do not stay cached."""

_LEAST_CACHED_TOKENS: Final = 10_000
"""Tokens cached alone with which the cache is judged: two or three conversations."""


class Part(NamedTuple):
    """A part of the promise that is judged."""

    is_met: bool
    is_known: bool
    """True when there are values enough to judge by."""

    is_feasible: bool
    """False when it would be missed without offline work, too."""

    missed: str
    """Words for a part that is missed."""

    kept: str = ""
    """Words for a part that is kept; empty without any."""


def judged_parts(
    slos: Sequence[Mapping[str, Any]],
    streams: Mapping[str, Any] | None,
    cache: Mapping[str, Any] | None,
) -> list[Part]:
    """Return the parts of the promise.

    Args:
        slos: SLOs with ``known`` and ``added_ms``.
        streams: ``streams`` of a replica's report.
        cache: From ``History.cache``.
    """
    parts = [Part(slo["met"], slo["known"], slo["feasible"], _missed(slo)) for slo in slos]
    if parts:
        parts[0] = parts[0]._replace(kept=_cost(slos))
    if streams is not None and streams["limit"] is not None:
        parts.append(_streams(streams))
    if cache is not None and cache["is_promised"] and cache["found_alone"] >= _LEAST_CACHED_TOKENS:
        share = cache["share"]
        text = f"conversations find {share:.0%} of the cached tokens that they would find alone"
        parts.append(Part(share >= _LEAST_FOUND, True, True, text, text))
    return parts


def verdict(parts: Sequence[Part], requests: int, *, has_billed: bool) -> tuple[str, str]:
    """Return one of ``LEVELS`` and a sentence.

    Args:
        parts: Parts of the promise.
        requests: Online requests that ended lately.
        has_billed: Offline work ran beside online requests, or that is unknown.
    """
    if not requests:
        return "unknown", "No online request has ended in the last 10 minutes."
    if not parts:
        return "unknown", (
            "Online users have no target: give the server --online-slowdown, --slo-ttft-ms, "
            "--slo-tpot-ms or --slo."
        )
    missed = [part for part in parts if not part.is_met]
    known = [part for part in missed if part.is_known]
    harmed = [part for part in known if part.is_feasible]
    if harmed:
        text = "; ".join(part.missed for part in harmed)
        if not has_billed:
            return "unknown", f"No offline work has run beside online requests, and yet {text}."
        return "harmed", f"Online users are hurt by offline work: {text}."
    if known:
        text = "; ".join(part.missed for part in known)
        return "overloaded", f"Targets are missed, and would be without offline work, too: {text}."
    if missed:
        text = "; ".join(part.missed for part in missed)
        return "unknown", f"Too few requests to judge yet: {text}."
    text = "; ".join(["Online users are within their targets", *(p.kept for p in parts if p.kept)])
    return "ok", f"{text}."


def has_enough(values: int, statistic: str) -> bool:
    """Return whether there are values enough for a statistic to say more than their maximum."""
    return values >= _NEEDED.get(statistic, 1)


def _streams(streams: Mapping[str, Any]) -> Part:
    limit, slowdown, kept_share = (streams[name] for name in ("limit", "slowdown", "kept_share"))
    is_known = has_enough(streams["streams"], "p99")
    if kept_share is None:
        return Part(True, is_known, True, "")
    p50, p99 = (f"{1 / slowdown[name]:.0%}" for name in ("p50", "p99"))
    return Part(
        streams["met"],
        is_known,
        True,
        f"{1 - kept_share:.1%} of streams are below {1 / limit:.0%} of their speed alone (the "
        f"slowest 1%: {p99})",
        f"streams run at {p50} of their speed alone (the slowest 1%: {p99})",
    )


def _missed(slo: Mapping[str, Any]) -> str:
    if slo["measured_ms"] is None:
        return ""
    text = f"{_name(slo)} is {_ms(slo['measured_ms'])}, allowed are {_ms(slo['limit_ms'])}"
    if slo["online_alone_ms"] is not None:
        text += f", without offline work {_ms(slo['online_alone_ms'])}"
    return text


def _cost(slos: Sequence[Mapping[str, Any]]) -> str:
    added = [
        f"{_ms(slo['added_ms'])} to {_name(slo)}" for slo in slos if slo["added_ms"] is not None
    ]
    return f"offline work adds {' and '.join(added)}" if added else ""


def _name(slo: Mapping[str, Any]) -> str:
    latency, statistic = str(slo["slo"]).split()[:2]
    return f"{statistic.replace('p', 'P')} {_LATENCIES[latency]}"


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"
