"""Tokens at an SLO: the most offline tokens/s of systems that keep a pair of targets."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from emulated_bench.compared import TOKENS, ComparedLoad, short
from emulated_bench.contenders import PLAIN, pairs
from sglang_coserve.metrics import SloTargets
from sglang_coserve.terminal import markdown_table, median_and_range

ENOUGH: Final = 0.99
"""Least share of the requests within both targets."""

GOAL: Final = 0.97
"""Least ratio of our offline tokens to the best stock setting's."""

_NONE: Final = "none keeps it"


@dataclass(frozen=True, slots=True)
class AtPair:
    """The best systems under one load that keep a pair of targets."""

    load: ComparedLoad
    pair: str
    ours: str | None
    """Ours with most tokens; None where none keeps the pair."""

    stock: str | None

    @classmethod
    def of(cls, load: ComparedLoad, pair: str) -> AtPair:
        """Find them."""
        return cls(load, pair, _best(load, load.ours, pair), _best(load, load.stock, pair))

    @property
    def ratios(self) -> list[float]:
        """Our tokens ÷ stock's, per seed. Empty unless both keep the pair."""
        if self.ours is None or self.stock is None:
            return []
        return self.load.ratios(self.ours, self.stock, TOKENS)

    @property
    def verdict(self) -> str:
        """The ratio, or who keeps the pair."""
        if found := self.ratios:
            return median_and_range(found)
        if self.ours is None and self.stock is None:
            return "–"
        return "**only stock**" if self.ours is None else "only ours"


def tokens_table(loads: Sequence[ComparedLoad]) -> str:
    """Return the table of all loads and pairs, and the sums of each pair."""
    names = list(pairs(SloTargets()))
    found = [AtPair.of(load, pair) for load in loads for pair in names]
    lines = [list(_cells(one)) for one in found]
    parts = [
        "## Tokens at an SLO",
        "P99 TTFT and TPOT. Most offline tokens/s (medians over seeds) of the systems that keep at "
        f"least {ENOUGH:.0%} of all seeds' requests within both; the ratio within seeds.",
        markdown_table(
            ("load", "TTFT and TPOT", "alone keeps", "ours", "best stock", "ours ÷ stock"), lines
        ),
        markdown_table(
            (
                *("TTFT and TPOT", "ours ÷ stock: median", "least", f"loads below {GOAL}"),
                *("only ours keeps it", "only stock", "none"),
            ),
            [_sums(name, [one for one in found if one.pair == name]) for name in names],
        ),
    ]
    return "\n\n".join(parts)


def _best(load: ComparedLoad, systems: Sequence[str], pair: str) -> str | None:
    keeping = [name for name in systems if load.attained(name, pair) >= ENOUGH]
    return max(keeping, key=lambda name: load.median(name, TOKENS), default=None)


def _cells(one: AtPair) -> Iterator[str]:
    load = one.load
    yield from (load.name, one.pair)
    yield f"{load.attained(PLAIN, one.pair):.1%}" if load.has_alone else ""
    for name in (one.ours, one.stock):
        yield _NONE if name is None else f"{load.median(name, TOKENS):,.0f} ({short(name)})"
    yield one.verdict


def _sums(name: str, found: Sequence[AtPair]) -> list[str]:
    medians = [statistics.median(ratios) for one in found if (ratios := one.ratios)]
    numbers = [
        sum(median < GOAL for median in medians),
        sum(one.ours is not None and one.stock is None for one in found),
        sum(one.ours is None and one.stock is not None for one in found),
        sum(one.ours is None and one.stock is None for one in found),
    ]
    most = [f"{statistics.median(medians):.2f}", f"{min(medians):.2f}"] if medians else ["–", "–"]
    return [name, *most, *map(str, numbers)]
