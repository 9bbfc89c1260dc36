"""Online users in the last minutes of a server: samples, and whether offline work hurts them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from sglang_coserve.view.verdict import LEVELS, has_enough, judged_parts, verdict

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

_CACHE: Final = {
    "online_prompt_tokens": "online_prompt_tokens",
    "online_found_tokens": "found",
    "online_found_alone_tokens": "found_alone",
}
"""Prompt tokens of online requests and the cache: sums since the start, by their names in
``cache`` of a replica."""

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
        for name, of in _CACHE.items():
            row[name] = _sum_if_known(replica["cache"][of] for replica in replicas)
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

    def cache(self) -> dict[str, Any] | None:
        """Return the prompt tokens that online requests found in the cache in this time.

        With ``found`` and ``found_alone``, which the same requests would have found without offline
        work, and ``share``, their ratio; None for the share if nothing would have been found.
        ``is_promised``: the cache keeps the prefixes of online requests. None as a whole where it
        is not known.
        """
        known = [row for row in self._rows if row["online_found_alone_tokens"] is not None]
        if not known:
            return None
        tokens, found, alone = (max(known[-1][name] - known[0][name], 0) for name in _CACHE)
        caches = [replica["cache"] for replica in self.latest]
        return {
            "online_prompt_tokens": tokens,
            "found": found,
            "found_alone": alone,
            "share": found / alone if alone else None,
            "protected_tokens": sum(cache["protected_tokens"] or 0 for cache in caches),
            "is_promised": all(cache["lease_s"] is not None for cache in caches),
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


def standing(
    replicas: Sequence[Mapping[str, Any]], cache: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return how online users stand, as JSON values.

    For each SLO, each latency and the streams, the replica that stands worst counts.

    Args:
        replicas: What each says of itself, as ``/coserve/status`` has it.
        cache: Prompt tokens found in the cache lately, from ``History.cache``; None if unknown.
    """
    reports = [replica["slo"] for replica in replicas]
    requests = sum(report["requests"] for report in reports)
    slos = [_worst(measures) for measures in zip(*(r["measured"] for r in reports), strict=True)]
    has_billed = any(_may_have_harmed(replica["online"]) for replica in replicas)
    streams = max((report["streams"] for report in reports), key=_slowness, default=None)
    parts = judged_parts(slos, streams, cache)
    level, text = verdict(parts, requests, has_billed=has_billed)
    return {
        "level": level,
        "text": text,
        "requests": requests,
        "attainment": _mean(reports, "attainment"),
        "attainment_online_alone": _mean(reports, "attainment_online_alone"),
        "slos": slos,
        "promise": replicas[0]["promise"] if replicas else None,
        "latencies": _worst_latencies([report["latencies"] for report in reports]),
        "streams": streams,
        "cache": cache,
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
    return has_enough(slo["values"], str(slo["slo"]).split()[1])


def _slowness(streams: Mapping[str, Any]) -> tuple[bool, float]:
    return not streams["met"], streams["slowdown"]["p99"] or 0.0


def _worst_latencies(replicas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def badness(compared: Mapping[str, Any]) -> tuple[float, float]:
        return compared["ratio"]["p99"] or 0.0, compared["measured_ms"]["p99"] or 0.0

    names = replicas[0] if replicas else ()
    return {name: max((each[name] for each in replicas), key=badness) for name in names}


def _added_ms(slo: Mapping[str, Any]) -> float | None:
    """Return what offline work adds: the measured statistic over that of the no-interference
    baseline. It is of one statistic, not of one request."""
    measured, alone = slo["measured_ms"], slo["online_alone_ms"]
    return None if measured is None or alone is None else max(measured - alone, 0.0)


def _may_have_harmed(online: Mapping[str, Any]) -> bool:
    """Return whether offline work ran beside an online request; True where nobody counts."""
    return online["delay_s"] is None or online["billed"] > 0


def _mean(reports: Sequence[Mapping[str, Any]], name: str) -> float | None:
    known = [(report[name], report["requests"]) for report in reports if report[name] is not None]
    requests = sum(count for _, count in known)
    return sum(value * count for value, count in known) / requests if requests else None
