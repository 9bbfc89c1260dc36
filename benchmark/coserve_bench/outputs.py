"""Writes what a benchmark found: JSON, a table, figures."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict

from rich.markdown import Markdown
from rich.table import Table

from common.results import markdown_table, write_json
from coserve_bench.offline_bounds import OfflineBounds
from coserve_bench.options import Options
from coserve_bench.plots import (
    plot_latency_ratios,
    plot_offline_throughput,
    plot_rate_searches,
    plot_timeline,
)
from coserve_bench.rate_search import RateSearch
from coserve_bench.run_record import RunRecord
from coserve_bench.runner import Runner
from coserve_bench.summary import searched, summarize_runs
from coserve_bench.table import markdown, overview
from sglang_coserve.errors import ConfigError

__all__ = ["write_comparison", "write_searches"]


def write_comparison(options: Options, runner: Runner) -> Table:
    """Write results.json, table.md and the figures of the runs there are; return an overview."""
    out = options.out
    why_no_bound = ""
    try:
        bounds = OfflineBounds.of(options, runner.records)
        rows = summarize_runs(runner.records, options.rules, bounds)
    except ConfigError as error:
        rows = summarize_runs(runner.records, options.rules)
        why_no_bound = f"\nNo bound: {error}.\n"
    text = markdown("Online and offline requests on one engine", rows) + why_no_bound
    text += f"\n{_conditions(options, runner)}\n"
    if speeds := _speeds(options, runner):
        text += f"\n{speeds}\n"
    (out / "table.md").write_text(text)
    write_json(
        out / "results.json",
        {
            "machine": runner.machine,
            "capacity_requests_per_s": runner.known_capacity_per_s,
            "machine_speed_ms": runner.speeds.measured_ms,
            "settings": options.of_measurement(),
            "rows": [asdict(row) for row in rows],
            "searched": [
                {"load": load, "kind": kind, "system": name}
                for (load, kind), name in searched(rows).items()
            ],
        },
    )
    if rows:
        plot_latency_ratios(rows, out / "latency.png")
        plot_offline_throughput(rows, out / "offline_throughput.png")
    first_repeat: dict[float, list[RunRecord]] = defaultdict(list)
    for record in runner.records:
        if record.key.repeat == 1:
            first_repeat[record.key.load].append(record)
    for load, records in first_repeat.items():
        plot_timeline(records, out / f"timeline_load{load:g}.png")
    return overview(rows)


def write_searches(
    options: Options, runner: Runner, searches: Mapping[str, RateSearch]
) -> Markdown:
    """Write ooco.json, ooco.md and ooco.png; return the text."""
    if not any(search.probes for search in searches.values()):
        return Markdown("There is no search yet.")
    out, (load,) = options.out, options.loads
    cells = []
    for system, search in searches.items():
        best = search.best
        cells.append(
            [system, "–", "–", "–", str(len(search.probes))]
            if best is None
            else [
                system,
                f"{'≥ ' if best.is_saturated else ''}{best.rate_per_s:.2f}",
                f"{best.served_tokens_per_s:.0f}",
                f"{best.violations:.1%}",
                str(len(search.probes)),
            ]
        )
    columns = ("system", "offline requests/s", "offline tokens/s", "violations", "runs")
    text = "\n\n".join(
        (
            f"# Largest offline rate at {load:.0%} online load",
            "The largest rate of Poisson arrivals at which at most 3% of the online requests miss "
            "their targets. ≥: the server could not serve more, and they were met.",
            markdown_table(columns, cells),
            _conditions(options, runner) + "\n",
        )
    )
    (out / "ooco.md").write_text(text)
    write_json(
        out / "ooco.json",
        {
            "machine": runner.machine,
            "load": load,
            "targets_s": asdict(runner.targets(options.rules[0], load)),
            "machine_speed_ms": runner.speeds.measured_ms,
            "settings": options.of_measurement(),
            "probes": {name: [asdict(p) for p in s.probes] for name, s in searches.items()},
        },
    )
    plot_rate_searches(searches, load, out / "ooco.png")
    return Markdown(text)


def _conditions(options: Options, runner: Runner) -> str:
    machine = runner.machine
    capacity = runner.known_capacity_per_s
    return (
        f"{machine['processor']}, {machine['cores']} cores"
        f"{', ' + machine['gpu'] if machine['gpu'] else ''}; SGLang {machine['sglang']}, "
        f"torch {machine['torch']}, sglang_coserve {machine['sglang_coserve']} "
        f"({machine['commit']}); windows of {options.window_s:g} s; capacity "
        f"{'unknown' if capacity is None else f'{capacity:.2f} online requests/s'}"
    )


def _speeds(options: Options, runner: Runner) -> str:
    """Say how steady the machine was, and which runs were made while it was not."""
    times_ms = runner.speeds.measured_ms
    if not times_ms:
        return ""
    off = sorted(
        record.key.name
        for record in runner.records
        if record.speed is not None
        and not runner.speeds.is_usual(record.speed, options.speed_tolerance)
    )
    text = (
        f"A fixed computation took {statistics.median(times_ms):.1f} ms "
        f"({min(times_ms):.1f}–{max(times_ms):.1f}, n = {len(times_ms)})."
    )
    if off:
        text += (
            f" The machine was more than {options.speed_tolerance:.0%} off that in "
            f"{len(off)} of {len(runner.records)} runs: {', '.join(off)}."
        )
    return text
