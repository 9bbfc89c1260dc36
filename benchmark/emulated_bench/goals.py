"""Goals of the default: its promise to online requests, and its tokens beside stock SGLang."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from emulated_bench.compared import TOKENS, ComparedLoad, short
from emulated_bench.contenders import DEFAULT, MIXED, PLAIN
from sglang_coserve.terminal import markdown_table, median_and_range

GAP_FACTOR: Final = 2.2
"""Most that the P99 gap may be, in median gaps alone, unless it is as much alone."""

SAME: Final = 0.1
"""Largest difference, as a share, of P99 gaps that count as the same."""

_CACHED: Final = "online_from_cache"
_FEW: Final = 0.05
"""Share of cached tokens below which a traffic shares no prefixes."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A column: ratios over the seeds, and their limit."""

    name: str
    values: Callable[[ComparedLoad], list[float]]
    limit: Callable[[ComparedLoad], float]
    is_least: bool = False
    """True if ratios must reach the limit, False if they must not exceed it."""

    def is_kept(self, load: ComparedLoad) -> bool | None:
        """Return whether the median is within the limit; None without values."""
        if not (values := self.values(load)):
            return None
        median, limit = statistics.median(values), self.limit(load)
        return median >= limit if self.is_least else median <= limit

    def cell(self, load: ComparedLoad) -> str:
        """Return the median and the range, bold where the goal is missed."""
        kept = self.is_kept(load)
        if kept is None:
            return "–"
        text = median_and_range(self.values(load))
        return text if kept else f"**{text}**"


@dataclass(frozen=True, slots=True)
class SameGap:
    """A setting of stock SGLang with the default's P99 gap, or one between two sizes of chunks."""

    smaller: str
    larger: str
    """The same setting, or the next larger chunks."""

    share: float = 0.0
    """Place between the two in the logarithm of the P99 gap, from 0 to 1."""

    @property
    def name(self) -> str:
        """Name for people."""
        if self.smaller == self.larger:
            return short(self.smaller)
        sizes = [name.removeprefix(f"{MIXED} of ") for name in (self.smaller, self.larger)]
        return f"between chunks of {' and '.join(sizes)}"

    def ratios(self, load: ComparedLoad, key: str) -> list[float]:
        """Return the default's figure ÷ the setting's, for each seed, interpolated."""
        low = load.by_seed(DEFAULT, self.smaller, key)
        high = load.by_seed(DEFAULT, self.larger, key)
        return [
            low[seed] ** (1 - self.share) * high[seed] ** self.share for seed in low if seed in high
        ]


def same_gap(load: ComparedLoad) -> SameGap | None:
    """Return the setting of stock SGLang with the default's P99 gap; None beyond all settings."""
    ratios = {
        name: ratio
        for name in load.stock
        if (ratio := load.ratio(DEFAULT, name, "itl_p99_ms")) is not None
    }
    nearest = min(ratios, key=lambda name: abs(ratios[name] - 1), default=None)
    if nearest is not None and abs(ratios[nearest] - 1) <= SAME:
        return SameGap(nearest, nearest)
    mixed = {name: ratio for name, ratio in ratios.items() if name.startswith(MIXED)}
    smaller = min((n for n in mixed if mixed[n] > 1), key=lambda n: mixed[n], default=None)
    larger = max((n for n in mixed if mixed[n] < 1), key=lambda n: mixed[n], default=None)
    if smaller is None or larger is None:
        return None
    low, high = math.log(mixed[smaller]), math.log(mixed[larger])
    return SameGap(smaller, larger, low / (low - high))


def _to_alone(key: str) -> Callable[[ComparedLoad], list[float]]:
    return lambda load: load.ratios(DEFAULT, PLAIN, key)


def _to_stock(key: str) -> Callable[[ComparedLoad], list[float]]:
    def values(load: ComparedLoad) -> list[float]:
        same = same_gap(load)
        return [] if same is None else same.ratios(load, key)

    return values


def _gaps(load: ComparedLoad) -> list[float]:
    """Return P99 gaps ÷ the largest P99 gap that the promise allows."""
    alone = load.rows[PLAIN]
    return [
        row["itl_p99_ms"] / max(GAP_FACTOR * alone[seed]["itl_p50_ms"], alone[seed]["itl_p99_ms"])
        for seed, row in sorted(load.rows[DEFAULT].items())
        if seed in alone
    ]


def _cached(load: ComparedLoad) -> list[float]:
    has_prefixes = load.median(PLAIN, _CACHED) >= _FEW
    return load.ratios(DEFAULT, PLAIN, _CACHED) if has_prefixes else []


def _fixed(limit: float) -> Callable[[ComparedLoad], float]:
    return lambda _: limit


_LONG_PROMPTS: Final = ("mooncake-conversation", "chat")
GOALS: Final = (
    Goal(
        "P99 TTFT ÷ alone",
        _to_alone("ttft_p99_ms"),
        lambda load: 1.15 if load.traffic in _LONG_PROMPTS else 1.10,
    ),
    Goal("P50 TTFT ÷ alone", _to_alone("ttft_p50_ms"), _fixed(1.25)),
    Goal("P99 gap ÷ limit", _gaps, _fixed(1.0)),
    Goal("P99 TPOT ÷ alone", _to_alone("tpot_p99_ms"), _fixed(2.0)),
    Goal("cached ÷ alone", _cached, _fixed(0.95), is_least=True),
    Goal("offline ÷ stock", _to_stock(TOKENS), _fixed(0.95), is_least=True),
    Goal("P99 TTFT ÷ stock", _to_stock("ttft_p99_ms"), _fixed(0.6)),
)


def goals_table(loads: Sequence[ComparedLoad]) -> str:
    """Return the default's goals under all loads, and how many loads keep each."""
    shown = [load for load in loads if load.has_alone and DEFAULT in load.rows]
    lines = [
        [
            load.name,
            *(goal.cell(load) for goal in GOALS),
            same.name if (same := same_gap(load)) else "none",
        ]
        for load in shown
    ]
    kept = [[one for load in shown if (one := goal.is_kept(load)) is not None] for goal in GOALS]
    lines.append(["loads that keep it", *(f"{sum(one)} of {len(one)}" for one in kept), ""])
    parts = [
        "## Goals of the default",
        "Medians over seeds (and ranges); **bold** where a goal is missed: P99 TTFT ≤ 1.10 × alone "
        "(Mooncake's and chats 1.15), P50 ≤ 1.25 ×, P99 gap ≤ the larger one of "
        f"{GAP_FACTOR} × the median gap alone and the P99 gap alone, P99 TPOT ≤ 2 ×, online tokens "
        "found in the cache ≥ 0.95 ×. *Stock*: the setting with the same P99 gap "
        f"(± {SAME:.0%}), or interpolated between two sizes of mixed chunks: offline tokens/s "
        "≥ 0.95 × at a P99 TTFT ≤ 0.6 ×.",
        markdown_table(["load", *(goal.name for goal in GOALS), "stock"], lines),
    ]
    return "\n\n".join(parts)
