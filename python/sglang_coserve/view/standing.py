"""Whether online users are hurt, and by how many milliseconds because of offline work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

_LATENCIES: Final = {"ttft": "TTFT", "tpot": "TPOT", "tbt": "time between tokens"}
_STATISTICS: Final = {"mean": "mean"}

_NEEDED: Final = {"p50": 2, "p90": 10, "p99": 100}
"""Values; of fewer, the percentile is the maximum."""

LEVELS: Final = ("ok", "unknown", "overloaded", "harmed")
"""Of how online users stand, from good to bad."""


def standing(replicas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how online users stand, as JSON values.

    Of each SLO the replica that stands worst counts.

    Args:
        replicas: What each says of itself, as ``/coserve/status`` has it.
    """
    reports = [replica["slo"] for replica in replicas]
    requests = sum(report["requests"] for report in reports)
    slos = [_worst(measures) for measures in zip(*(r["measured"] for r in reports), strict=True)]
    has_billed = any(_may_have_harmed(replica["online"]) for replica in replicas)
    level, text = _verdict(slos, requests, has_billed=has_billed)
    return {
        "level": level,
        "text": text,
        "requests": requests,
        "attainment": _mean(reports, "attainment"),
        "attainment_online_alone": _mean(reports, "attainment_online_alone"),
        "slos": slos,
    }


def fleet_standing(engines: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return how the online users of several engines stand, as JSON values: as on the worst.

    Args:
        engines: What ``standing`` says of each that is known, by name, with its ``bill``.
    """
    if not engines:
        text = "No engine has said how its online users stand."
        return {"level": "unknown", "text": text, "requests": 0, "bill": None}
    level = max((users["level"] for users in engines.values()), key=LEVELS.index)
    texts: dict[str, list[str]] = {}
    for name, users in engines.items():
        if users["level"] == level:
            texts.setdefault(users["text"], []).append(name)
    return {
        "level": level,
        "text": " ".join(f"{', '.join(names)}: {text}" for text, names in texts.items()),
        "requests": sum(users["requests"] for users in engines.values()),
        "bill": _bill_of_all([users["bill"] for users in engines.values() if users["bill"]]),
    }


def _bill_of_all(bills: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    requests = sum(bill["requests"] for bill in bills)
    if not requests:
        return None
    means = {
        name: sum(bill[name] * bill["requests"] for bill in bills) / requests
        for name in ("mean_ms", "ttft_ms", "gaps_ms")
    }
    return {"requests": requests, **means}


def _worst(measures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def badness(slo: Mapping[str, Any]) -> tuple[bool, bool, float]:
        return not slo["met"] and _is_known(slo), not slo["met"], slo["measured_ms"] or 0.0

    worst = max(measures, key=badness)
    return {**worst, "added_ms": _added_ms(worst), "known": _is_known(worst)}


def _is_known(slo: Mapping[str, Any]) -> bool:
    return bool(slo["values"] >= _NEEDED.get(str(slo["slo"]).split()[1], 1))


def _added_ms(slo: Mapping[str, Any]) -> float | None:
    """Return what offline work adds: the measured statistic over that of the no-interference
    baseline. It is of one statistic, not of one request."""
    measured, alone = slo["measured_ms"], slo["online_alone_ms"]
    return None if measured is None or alone is None else max(measured - alone, 0.0)


def _may_have_harmed(online: Mapping[str, Any]) -> bool:
    """Return whether offline work ran beside an online request; True where nobody counts."""
    return online["delay_s"] is None or online["billed"] > 0


def _verdict(
    slos: Sequence[Mapping[str, Any]], requests: int, *, has_billed: bool
) -> tuple[str, str]:
    if not requests:
        return "unknown", "No online request has ended in the last 10 minutes."
    if not slos:
        return "unknown", (
            "Online users have no target: give the server --online-slowdown, --slo-ttft-ms, "
            "--slo-tpot-ms or --slo."
        )
    missed = [slo for slo in slos if not slo["met"]]
    known = [slo for slo in missed if slo["known"]]
    harmed = [slo for slo in known if slo["feasible"]]
    if harmed:
        text = "; ".join(map(_missed, harmed))
        if not has_billed:
            return "unknown", f"No offline work has run beside online requests, and yet {text}."
        return "harmed", f"Online users are hurt by offline work: {text}."
    if known:
        text = "; ".join(map(_missed, known))
        return "overloaded", f"Targets are missed, and would be without offline work, too: {text}."
    if missed:
        text = "; ".join(map(_missed, missed))
        return "unknown", f"Too few requests to judge yet: {text}."
    return "ok", f"Online users are within their targets{_cost(slos)}."


def _missed(slo: Mapping[str, Any]) -> str:
    text = f"{_name(slo)} is {_ms(slo['measured_ms'])}, allowed are {_ms(slo['limit_ms'])}"
    if slo["online_alone_ms"] is not None:
        text += f", without offline work {_ms(slo['online_alone_ms'])}"
    return text


def _cost(slos: Sequence[Mapping[str, Any]]) -> str:
    added = [
        f"{_ms(slo['added_ms'])} to {_name(slo)}" for slo in slos if slo["added_ms"] is not None
    ]
    return f"; offline work adds {' and '.join(added)}" if added else ""


def _name(slo: Mapping[str, Any]) -> str:
    latency, statistic = str(slo["slo"]).split()[:2]
    return f"{_STATISTICS.get(statistic, statistic.upper())} {_LATENCIES[latency]}"


def _ms(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _mean(reports: Sequence[Mapping[str, Any]], name: str) -> float | None:
    known = [(report[name], report["requests"]) for report in reports if report[name] is not None]
    requests = sum(count for _, count in known)
    return sum(value * count for value, count in known) / requests if requests else None
