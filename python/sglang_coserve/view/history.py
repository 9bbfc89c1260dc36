"""The last minutes of a server, sampled once a second.

A sample is what ``/coserve/status`` says of the replicas, summed up. Counters of steps become
rates: the difference to the sample before, by the time in between.
"""

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
        self._at_s = 0.0
        self._latest: tuple[_Replica, ...] = ()

    @property
    def latest(self) -> tuple[_Replica, ...]:
        """The states of the replicas as they were sampled last; empty before the first."""
        return self._latest

    @property
    def latest_at_s(self) -> float:
        """When that was."""
        return self._at_s

    def add(self, at_s: float, replicas: Sequence[_Replica]) -> None:
        """Take a sample. O(replicas).

        Args:
            at_s: Seconds since the epoch; later than that of the sample before.
            replicas: What each says of itself, as ``/coserve/status`` has it.
        """
        totals = _totals(replicas)
        row: dict[str, Any] = {"at": round(at_s, 3)}
        for name in (*_SHARES, *_RATES):
            row[name] = None
        elapsed_s = at_s - self._at_s
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
        self._totals, self._at_s, self._latest = totals, at_s, tuple(replicas)

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
    if not replicas or not all("work" in replica for replica in replicas):
        return None
    names = {*_SHARES.values(), *_RATES.values()} - {"suspensions"}
    totals = {name: sum(replica["work"][name] for replica in replicas) for name in names}
    totals["suspensions"] = sum(
        sum(replica.get("safepoints", {}).get("suspended", {}).values()) for replica in replicas
    )
    return totals
