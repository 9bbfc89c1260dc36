"""Online users in the last minutes of a server: samples, and whether offline work hurts them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

_SAMPLES: Final = 300
"""Five minutes; as JSON about 40 KB."""

_SHARES: Final = {
    "online_share": "online_s",
    "offline_share": "offline_s",
    "granted_share": "granted_s",
    "lost_share": "lost_s",
}
"""Parts of the engine's time, and the sums that they are differences of."""

_RATES: Final = {
    "online_tokens_per_s": "online_tokens",
    "offline_tokens_per_s": "offline_tokens",
    "retracted_tokens_per_s": "retracted_tokens",
    "dropped_steps_per_s": "dropped_steps",
    "suspensions_per_s": "suspensions",
}

_BILL: Final = ("delay_s", "delay_ttft_s", "delay_gaps_s", "billed")
"""The bill of the online requests that have ended: sums since the start."""

_Replica = Mapping[str, Any]


class History:
    """A bounded series of samples."""

    def __init__(self, samples: int = _SAMPLES) -> None:
        self._rows: deque[dict[str, Any]] = deque(maxlen=samples)
        self._totals: dict[str, float] | None = None
        self.latest: tuple[_Replica, ...] = ()
        """The states of the replicas as they were sampled last; empty before the first."""

        self.latest_at_s = 0.0
        """When that was."""

    def add(self, at_s: float, replicas: Sequence[_Replica]) -> None:
        """Take a sample. O(replicas).

        Args:
            at_s: Seconds since the epoch; later than that of the sample before.
            replicas: What each says of itself, as ``/coserve/status`` has it. One whose status has
                failed says nothing and is left out; of none at all there is no sample.
        """
        replicas = [replica for replica in replicas if replica]
        if not replicas:
            return
        totals = _totals(replicas)
        row: dict[str, Any] = {"at": round(at_s, 3), **dict.fromkeys((*_SHARES, *_RATES))}
        elapsed_s = at_s - self.latest_at_s
        if totals is not None and self._totals is not None and elapsed_s > 0:
            before = self._totals
            for name, of in _SHARES.items():
                share = (totals[of] - before[of]) / elapsed_s / len(replicas)
                row[name] = round(max(share, 0.0), 4)
            for name, of in _RATES.items():
                row[name] = round(max((totals[of] - before[of]) / elapsed_s, 0.0), 2)
        for who in ("online", "offline"):
            for state in ("waiting", "running"):
                row[f"{who}_{state}"] = sum(replica[who][state] for replica in replicas)
            row[f"{who}_kv_tokens"] = sum(replica["kv_tokens"][who] for replica in replicas)
        for name in _BILL:
            row[f"online_{name}"] = _sum_if_known(replica["online"][name] for replica in replicas)
        for state in ("cached", "free"):
            row[f"{state}_kv_tokens"] = sum(replica["kv_tokens"][state] for replica in replicas)
        self._rows.append(row)
        self._totals, self.latest_at_s, self.latest = totals, at_s, tuple(replicas)

    def columns(self, since_s: float = 0.0) -> dict[str, list[Any]]:
        """Return the samples taken after ``since_s``: a list for each quantity, all as long."""
        rows = [row for row in self._rows if row["at"] > since_s]
        names = self._rows[-1] if self._rows else ()
        return {name: [row[name] for row in rows] for name in names}

    def bill(self) -> dict[str, float] | None:
        """Return by how much offline work delayed the online requests that ended in this time.

        The mean of a request in milliseconds, of which for its TTFT and its gaps, and how
        many there were; None where it is not known, or there was none.
        """
        known = [row for row in self._rows if row["online_delay_s"] is not None]
        if not known:
            return None
        sums = {name: known[-1][f"online_{name}"] - known[0][f"online_{name}"] for name in _BILL}
        requests = sums["billed"]
        if requests <= 0:
            return None
        return {
            "requests": requests,
            "mean_ms": sums["delay_s"] / requests * 1e3,
            "ttft_ms": sums["delay_ttft_s"] / requests * 1e3,
            "gaps_ms": sums["delay_gaps_s"] / requests * 1e3,
        }


def _sum_if_known(values: Iterable[float | None]) -> float | None:
    found = list(values)
    return None if None in found else sum(value for value in found if value is not None)


def _totals(replicas: Sequence[_Replica]) -> dict[str, float] | None:
    """Return the sums of all replicas; None where none are kept: a policy that does not plan."""
    if not all("work" in replica for replica in replicas):
        return None
    names = {*_SHARES.values(), *_RATES.values()} - {"suspensions"}
    totals = {name: sum(replica["work"][name] for replica in replicas) for name in names}
    totals["suspensions"] = sum(
        sum(replica.get("safepoints", {}).get("suspended", {}).values()) for replica in replicas
    )
    return totals


_LATENCIES: Final = {"ttft": "TTFT", "tpot": "TPOT", "tbt": "time between tokens"}
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
    means = {name: _mean(bills, name) for name in ("mean_ms", "ttft_ms", "gaps_ms")}
    known = {name: mean for name, mean in means.items() if mean is not None}
    return {"requests": sum(bill["requests"] for bill in bills), **known} if known else None


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
    return f"{statistic.replace('p', 'P')} {_LATENCIES[latency]}"


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _mean(reports: Sequence[Mapping[str, Any]], name: str) -> float | None:
    known = [(report[name], report["requests"]) for report in reports if report[name] is not None]
    requests = sum(count for _, count in known)
    return sum(value * count for value, count in known) / requests if requests else None
