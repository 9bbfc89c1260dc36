"""The stored figures of loads, to compare systems under the same requests."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from emulated_bench.contenders import OURS, PLAIN, STOCK
from sglang_coserve.errors import ConfigError

TOKENS: Final = "offline_tokens_per_s"
"""Name of the only figure that is better if it is larger."""


@dataclass(frozen=True, slots=True)
class ComparedLoad:
    """The rows of one load."""

    name: str
    traffic: str
    kind: str
    """Kind of the figures: emulated or simulated."""

    device: str
    rows: Mapping[str, Mapping[int, Mapping[str, Any]]]
    """Row of figures per system and seed."""

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Self:
        """Return the load of a file."""
        rows: dict[str, dict[int, Mapping[str, Any]]] = {}
        for row in stored["rows"]:
            rows.setdefault(row["system"], {})[row["repeat"]] = row
        return cls(stored["name"], stored["traffic"], stored["kind"], stored["device"], rows)

    @property
    def ours(self) -> list[str]:
        """The systems that are ours."""
        return [name for name in self.rows if name.startswith(f"{OURS},")]

    @property
    def stock(self) -> list[str]:
        """The settings of stock SGLang beside offline work."""
        return [name for name in self.rows if name.startswith(f"{STOCK},")]

    @property
    def has_alone(self) -> bool:
        """True if there are figures of online requests alone."""
        return PLAIN in self.rows

    def values(self, system: str, key: str) -> list[float]:
        """Return a figure for each seed."""
        return [row[key] for _, row in sorted(self.rows[system].items())]

    def median(self, system: str, key: str) -> float:
        """Return the median of a figure over the seeds."""
        return statistics.median(self.values(system, key))

    def ratios(self, system: str, base: str, key: str) -> list[float]:
        """Return the figure of ``system`` ÷ the figure of ``base`` for each seed of both."""
        return list(self.by_seed(system, base, key).values())

    def by_seed(self, system: str, base: str, key: str) -> dict[int, float]:
        """Return the figure of ``system`` ÷ the figure of ``base`` by seed.

        Each seed has other requests, so ratios are taken within a seed.
        """
        others = self.rows[base]
        return {
            seed: row[key] / others[seed][key]
            for seed, row in sorted(self.rows[system].items())
            if seed in others and others[seed][key]
        }

    def ratio(self, system: str, base: str, key: str) -> float | None:
        """Return the median of ``ratios``; None where there are none."""
        found = self.ratios(system, base, key)
        return statistics.median(found) if found else None

    def attained(self, system: str, pair: str) -> float:
        """Return the share of all seeds' requests that are within a pair of targets."""
        rows = self.rows[system].values()
        kept = sum(row["attained"][pair] * row["online"] for row in rows)
        return float(kept / sum(row["online"] for row in rows))


def compared_loads(folder: Path) -> list[ComparedLoad]:
    """Return all loads of a folder, by traffic and load.

    Raises:
        ConfigError: the folder has no figures of loads.
    """
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    loads = [one for one in found if one.get("rows")]
    if not loads or any("kind" not in one for one in loads):
        raise ConfigError(f"{folder} has no figures of loads: give the --out of a campaign")
    loads.sort(key=lambda one: (one["traffic"], one["load"], one["offline"]))
    return [ComparedLoad.of(one) for one in loads]


def short(system: str) -> str:
    """Return the name of a system without its first word, for the head of a column."""
    return system.removeprefix(f"{STOCK}, ").removeprefix(f"{OURS}, ")


def all_of(loads: Sequence[ComparedLoad], which: str) -> list[str]:
    """Return the systems of any load, ``ours`` or ``stock``, in the order of the first."""
    return list(dict.fromkeys(name for load in loads for name in getattr(load, which)))
