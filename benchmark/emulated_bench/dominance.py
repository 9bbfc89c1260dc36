"""Comparisons of our systems with each setting of stock SGLang in six measures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from emulated_bench.compared import TOKENS, ComparedLoad, all_of, short
from emulated_bench.contenders import DEFAULT
from sglang_coserve.terminal import markdown_table

MEASURES: Final = {
    "ttft_p50_ms": "TTFT P50",
    "ttft_p99_ms": "TTFT P99",
    "itl_p50_ms": "gap P50",
    "itl_p99_ms": "gap P99",
    "tpot_p99_ms": "TPOT P99",
    TOKENS: "offline tokens/s",
}
EQUAL: Final = 0.02
"""Differences of less than this share count as none."""


class Verdict(Enum):
    """Dominating system of a pair: better in some measure, worse in none."""

    OURS = "we"
    NEITHER = "–"
    STOCK = "**it**"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One of our systems and a setting of stock SGLang under one load."""

    better: Sequence[str]
    """Measures in which ours is better."""

    worse: Sequence[str]

    @property
    def verdict(self) -> Verdict:
        """Return the dominating system, or neither."""
        if bool(self.better) == bool(self.worse):
            return Verdict.NEITHER
        return Verdict.OURS if self.better else Verdict.STOCK

    @property
    def cell(self) -> str:
        """The verdict, and in how many measures ours and stock are better."""
        return f"{self.verdict.value} {len(self.better)}:{len(self.worse)}"


def compare(load: ComparedLoad, ours: str, stock: str) -> Comparison:
    """Compare medians of ratios over the seeds that both have."""
    better: list[str] = []
    worse: list[str] = []
    for key, name in MEASURES.items():
        ratio = load.ratio(ours, stock, key)
        if ratio is None or max(ratio, 1 / ratio if ratio else 2.0) < 1 + EQUAL:
            continue
        (better if (ratio < 1) != (key == TOKENS) else worse).append(name)
    return Comparison(better, worse)


def dominance_table(loads: Sequence[ComparedLoad]) -> str:
    """Return our default against each setting of stock SGLang, and the sums of all of ours."""
    settings = all_of(loads, "stock")
    sums = {name: Counter[Verdict]() for name in settings}
    lines = []
    for load in loads:
        cells = []
        for name in settings:
            if name not in load.rows or DEFAULT not in load.rows:
                cells.append("")
                continue
            found = compare(load, DEFAULT, name)
            sums[name][found.verdict] += 1
            cells.append(found.cell)
        lines.append([load.name, *cells])
    lines.append(["we, neither, **it**", *(_sum(sums[name]) for name in settings)])
    measures = ", ".join(MEASURES.values())
    parts = [
        "## Never dominated",
        f"*We*: our default is better than stock SGLang's setting in one of {measures}, and worse "
        f"in none. **It**: the other way round. Differences below {EQUAL:.0%} count as none. "
        "Numbers: in how many of the six ours is better, and in how many stock.",
        markdown_table(["load", *map(short, settings)], lines),
        "All of ours, over all loads and settings of stock SGLang. *Loads*: where ours dominates "
        "one or more settings.",
        markdown_table(
            ("system", "we dominate", "neither", "it dominates", "loads", "dominated at"),
            [_of_system(loads, name) for name in all_of(loads, "ours")],
        ),
    ]
    return "\n\n".join(parts)


def _sum(count: Counter[Verdict]) -> str:
    return ", ".join(str(count[verdict]) for verdict in Verdict)


def _of_system(loads: Sequence[ComparedLoad], ours: str) -> list[str]:
    """Return the sums of one of our systems, and where it is dominated."""
    shown = [load for load in loads if ours in load.rows and load.stock]
    count = Counter[Verdict]()
    num_loads = 0
    dominated = []
    for load in shown:
        found = {name: compare(load, ours, name).verdict for name in load.stock}
        count.update(found.values())
        num_loads += Verdict.OURS in found.values()
        dominated += [
            f"{load.name}: {short(name)}" for name, one in found.items() if one is Verdict.STOCK
        ]
    numbers = [str(count[verdict]) for verdict in Verdict]
    return [ours, *numbers, f"{num_loads} of {len(shown)}", "; ".join(dominated) or "none"]
