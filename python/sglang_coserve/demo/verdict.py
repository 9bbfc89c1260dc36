"""The demo's sentences: both systems beside online requests alone, also where ours is worse."""

from __future__ import annotations

from typing import Final

from sglang_coserve.demo.result import (
    COLUMNS,
    METRICS,
    PERCENTILES,
    Column,
    DemoResult,
    Metric,
    SystemResult,
)

_ALIKE: Final = 0.05
"""Values that differ by less are called alike: windows are short, and a P99 is of few values."""

_UNFINISHED: Final = 0.1
"""Where a larger part of the requests did not finish, latencies are of the others alone."""

Ratios = dict[Column, float]
"""Latencies beside offline work ÷ those alone."""


def sentence(result: DemoResult) -> str:
    """Return the result in words: each metric of both systems, and where ours is worse."""
    found = _sentence(result)
    return found if result.emulated is None else f"{result.kind}: {found}"


def _sentence(result: DemoResult) -> str:
    alone, stock, ours = result.alone, result.stock, result.ours
    if alone is None or stock is None:
        return (
            f"Beside {len(ours.online)} online requests, offline work got "
            f"{ours.offline_tokens_per_s:,.0f} tokens/s; without --quick it is compared."
        )
    unfinished = max(len(each.online) - each.finished for each in result.systems)
    if unfinished > _UNFINISHED * len(ours.online):
        return (
            f"The machine is too slow or too busy for this trace: {unfinished} of "
            f"{len(ours.online)} online requests did not finish, so nothing can be compared."
        )
    ratios, stock_ratios = _ratios(ours, alone), _ratios(stock, alone)
    if ratios is None or stock_ratios is None:
        return "Too few tokens came to compare the systems: give it more --seconds."
    tokens = (ours.offline_tokens_per_s, stock.offline_tokens_per_s)
    share = tokens[0] / max(tokens[1], 1e-9)
    parts = [
        f"{each.words} {_both(ratios, each)} with ours, {_both(stock_ratios, each)} with stock"
        for each in METRICS
    ]
    return (
        "Beside offline work, online latencies are, as multiples of the same alone (P50 and P99): "
        f"{'; '.join(parts)}. Offline work gets {share:.2f} × the tokens with ours "
        f"({tokens[0]:,.0f} and {tokens[1]:,.0f} a second). {_verdict(ratios, stock_ratios, share)}"
    )


def _both(ratios: Ratios, metric: Metric) -> str:
    return " and ".join(f"{ratios[metric, name]:.1f} ×" for name in PERCENTILES)


def _ratios(system: SystemResult, alone: SystemResult) -> Ratios | None:
    """Return each latency over the same one alone; None where one is not known."""
    found, base = system.latencies_ms(), alone.latencies_ms()
    ratios = {}
    for column in COLUMNS:
        value, base_value = found[column], base[column]
        if not value or not base_value:
            return None
        ratios[column] = value / base_value
    return ratios


def _verdict(ours: Ratios, stock: Ratios, tokens: float) -> str:
    """Return in which columns ours is better and in which it is worse.

    ``tokens`` are offline tokens of ours ÷ those of stock.
    """
    # Each as ours ÷ stock, where less is better.
    compared = {f"{m.short} {name}": ours[m, name] / stock[m, name] for m, name in COLUMNS}
    compared["offline tokens"] = 1 / tokens if tokens else float("inf")
    better = [name for name, ratio in compared.items() if ratio < 1 / (1 + _ALIKE)]
    worse = [name for name, ratio in compared.items() if ratio > 1 + _ALIKE]
    alike = [name for name in compared if name not in better and name not in worse]
    said = [
        f"{how} {_listed(names)}"
        for how, names in (("better in", better), ("worse in", worse), ("alike in", alike))
        if names
    ]
    return f"Ours is {'; '.join(said)}."


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
