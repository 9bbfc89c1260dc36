"""All tables of the loads in a folder, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from emulated_bench.compared import TOKENS, ComparedLoad
from emulated_bench.contenders import PLAIN, pairs
from emulated_bench.dominance import dominance_table
from emulated_bench.goals import goals_table
from emulated_bench.tokens_at_slo import tokens_table
from sglang_coserve.metrics import SloTargets
from sglang_coserve.terminal import markdown_table

Row = Mapping[str, Any]
_COLUMNS: Final[Mapping[str, tuple[Sequence[str], Callable[[float], str]]]] = {
    "TTFT P50, P99 ms": (("ttft_p50_ms", "ttft_p99_ms"), "{:,.0f}".format),
    "gap P50, P99 ms": (("itl_p50_ms", "itl_p99_ms"), "{:.1f}".format),
    "TPOT P50, P99 ms": (("tpot_p50_ms", "tpot_p99_ms"), "{:.1f}".format),
    "end to end P50 s": (("e2e_p50_ms",), lambda ms: f"{ms / 1e3:.2f}"),
    "online from cache": (("online_from_cache",), "{:.0%}".format),
    "suspended": (("suspended",), "{:.0f}".format),
    "preempted ÷ online": (("preemptions_per_online_request",), "{:.2f}".format),
    "from prefixes": (("from_prefixes",), "{:.1%}".format),
    "recomputed": (("recomputed",), "{:.1%}".format),
    "host ms a step": (("host_ms_per_step",), "{:.1f}".format),
}
"""Figures of each column, and their form; a column is left out where no row has it."""


def report(loads: Sequence[ComparedLoad]) -> str:
    """Return all tables of some loads."""
    devices = ", ".join(dict.fromkeys(f"{load.kind}: {load.device}" for load in loads))
    complete = [load for load in loads if load.has_alone and load.ours and load.stock]
    left_out = "; ".join(load.name for load in loads if load not in complete)
    parts = (
        f"# {devices}: no GPU was measured",
        *(
            [f"Not compared, without a row of ours, of stock or alone: {left_out}."]
            * bool(left_out)
        ),
        dominance_table(complete),
        tokens_table(complete),
        goals_table(loads),
        _all_table(loads),
    )
    return "\n\n".join(parts)


def _all_table(loads: Sequence[ComparedLoad]) -> str:
    rows = [row for load in loads for runs in load.rows.values() for row in runs.values()]
    shown = [name for name, (keys, _) in _COLUMNS.items() if any(keys[0] in row for row in rows)]
    targets = list(pairs(SloTargets()))
    head = ["load", "system", "seeds", "offline tokens/s", "÷ bound", *shown, *targets]
    lines = [
        [load.name, system, *_cells(load, system, shown, targets)]
        for load in loads
        for system in load.rows
    ]
    says = (
        "Medians over seeds. Last: share of all seeds' requests within P99 targets of TTFT and "
        "TPOT. *Bound*: the most that is possible with targets of 1.2 × alone."
    )
    return "\n\n".join(("## All figures", says, markdown_table(head, lines)))


def _cells(
    load: ComparedLoad, system: str, shown: Sequence[str], targets: Sequence[str]
) -> list[str]:
    runs = load.rows[system].values()
    tokens = "–" if system == PLAIN else f"{load.median(system, TOKENS):,.0f}"
    cells = [str(len(runs)), tokens, _of_bound(load, system)]
    for name in shown:
        keys, form = _COLUMNS[name]
        known = [row for row in runs if keys[0] in row]
        medians = [statistics.median(row[key] for row in known) for key in keys if known]
        cells.append(", ".join(map(form, medians)) or "–")
    return cells + [f"{load.attained(system, name):.1%}" for name in targets]


def _of_bound(load: ComparedLoad, system: str) -> str:
    """Return the median of tokens ÷ bound; alone has the bound of its seed."""
    bounds = {seed: row.get("bound_tokens_per_s") for seed, row in load.rows.get(PLAIN, {}).items()}
    shares = [
        row[TOKENS] / bounds[seed] for seed, row in load.rows[system].items() if bounds.get(seed)
    ]
    return f"{statistics.median(shares):.2f}" if shares and system != PLAIN else "–"
