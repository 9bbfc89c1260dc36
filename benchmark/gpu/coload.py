"""Steps ``coload``, ``coload-rates``, …: ``bench_coserve.py`` on the GPU, one load after another.

ConServe §6.2: Gamma arrivals with CV 0.5, 4096 prompt and 256 output tokens, beside
offline work that never runs out; and traces. Online-only, ours, non-preemptive and
stock SGLang with priorities, in this order, so that what is stopped early has what
matters most.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from coserve_bench.systems import BASELINE
from coserve_bench.table import markdown_table
from gpu.profile import existing_profile
from gpu.record import read_json
from gpu.task import Task, run_step
from gpu.trace_slices import SLICES, write_slice
from sglang_coserve.errors import ServerError

_BENCH: Final = Path(__file__).resolve().parent.parent / "bench_coserve.py"
_SYSTEMS: Final = (BASELINE, "coserve", "non-preemptive", "stock-priority")
_INTERRUPTED: Final = 130
_SPARE_S: Final = 40.0
_HEADLINE_RATE: Final = 2.0


@dataclass(frozen=True, slots=True)
class Load:
    """Online requests of one step."""

    rates_per_s: tuple[float, ...]
    trace: str | None = None
    """One of ``SLICES``; None: Gamma arrivals."""

    slo_scales: tuple[float, ...] = (1.0, 1.2)
    window_s: int = 50


LOADS: Final[Mapping[str, Load]] = {
    "coload": Load((_HEADLINE_RATE,)),
    "coload-rates": Load((1.0, 3.0, 4.0), slo_scales=(1.2,)),
    "coload-azure": Load((4.0,), trace="azure", slo_scales=(1.2,)),
    "coload-burstgpt": Load((2.0,), trace="burstgpt", slo_scales=(1.2,)),
}

TARGETS: Final = {
    # Of the runs at 2 req/s. ConServe: 1.25×, 1.19×, 82%.
    "p99_ttft_ms": ("ratios", "at most", 1.10),
    "p99_itl_ms": ("ratios", "at most", 1.10),
    "offline_tokens_per_s": ("ratios", "at least", 0.90),
    "attainment": ("figures", "at least", 0.99),
}


def measure(task: Task) -> bool:
    """Make all runs of the step's load that the time allows."""
    load, out = LOADS[task.name], task.folder / "runs"
    due = len(load.rates_per_s) * (len(_SYSTEMS) - 1 + len(load.slo_scales))
    try:
        code = task.run(command(task, load, out), spare_s=_SPARE_S)
    finally:
        # Also after an interruption.
        made = report(task, out, due)
    if code not in (0, _INTERRUPTED):
        raise ServerError(f"bench_coserve.py ended with {code}: some runs failed; see the log")
    return made >= due


def report(task: Task, out: Path, due: int) -> int:
    """Report the runs there are, of ``due``; return how many."""
    results = read_json(out / "results.json")
    if results is None or not results["rows"]:
        return 0
    made = len(list((out / "runs").glob("*.json")))
    figures = {
        "runs": made,
        "runs_due": due,
        "rows": results["rows"],
        "settings": results["settings"],
        "targets": judged(results["rows"]) if task.name == "coload" else [],
    }
    task.report(figures, *tables(figures))
    return made


def command(task: Task, load: Load, out: Path) -> list[str]:
    """Return the command line of ``bench_coserve.py``; it goes on where it was stopped."""
    dry = task.dry_run
    # With a capacity of 1 req/s the load is the rate.
    flags = ["--out", str(out), "--capacity", "1", "--online-load", *map(str, load.rates_per_s)]
    flags += ["--systems", *_SYSTEMS, "--repeats", "1", "--seed", "1", "--drain", "120"]
    flags += ["--slo-scale", *map(str, load.slo_scales)]
    flags += ["--model-path", str(task.model_path())]
    flags += [f"--server-flags={' '.join(task.server_flags())}"]
    flags += ["--window", "5" if dry else str(load.window_s), "--warmup", "1" if dry else "5"]
    flags += ["--online-warmup", "1" if dry else "5"]
    flags += ["--ready-timeout", "400"]
    if load.trace is not None:
        trace = write_slice(task.folder / f"{load.trace}.csv", SLICES[load.trace])
        flags += ["--online-trace", str(trace)]
    else:
        flags += ["--cv", "0.5", "--online-range-ratio", "1"]
        flags += ["--online-input-len", "64" if dry else "4096"]
        flags += ["--online-output-len", "8" if dry else "256"]
    flags += ["--offline-input-len", "128" if dry else "4096"]
    flags += ["--offline-output-len", "8" if dry else "128"]
    flags += ["--offline-lines", "2000" if dry else "2500"]
    flags += ["--offline-concurrency", "4" if dry else "96"]
    if (profile := own_profile(task, out)) is not None:
        flags += ["--latency-profile", str(profile)]
    return [sys.executable, str(_BENCH), *flags]


def own_profile(task: Task, out: Path) -> Path | None:
    """Return the profile that all runs of this step use, a copy; None: servers profile.

    What the first attempt had stays, as runs with another one would not compare.
    """
    copy = task.folder / "latency_profile.json"
    if not copy.exists() and not out.exists() and (profile := existing_profile(task)) is not None:
        shutil.copy(profile, copy)
    return copy if copy.exists() else None


def judged(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the targets at the headline rate, each with what was reached."""
    found = []
    for row in rows:
        if row["system"] != "coserve" or row["load"] != _HEADLINE_RATE:
            continue
        for name, (of, sense, limit) in TARGETS.items():
            if name == "attainment" and row["slo"] != "p99x1.2":
                continue
            if (spread := row[of].get(name)) is None:
                continue
            value = spread["median"]
            is_met = value <= limit if sense == "at most" else value >= limit
            found.append(
                {
                    "slo": row["slo"],
                    "figure": name,
                    "reached": value,
                    "target": f"{sense} {limit}",
                    "is_met": is_met,
                }
            )
    return found


def tables(figures: Mapping[str, Any]) -> list[str]:
    """Return the runs, and how the targets were met."""
    columns = (
        *("online req/s", "system", "P99 TTFT (ms)", "÷ online-only", "P99 ITL (ms)"),
        *("÷ online-only", "mean TPOT (ms)", "÷ online-only", "within SLO"),
        *("offline tokens/s", "÷ non-preemptive"),
    )
    found = [markdown_table(columns, [_cells(row) for row in figures["rows"]])]
    if figures["runs"] < figures["runs_due"]:
        found.append(f"{figures['runs']} of {figures['runs_due']} runs so far.")
    if targets := figures["targets"]:
        cells = [
            [
                t["slo"],
                t["figure"],
                f"{t['reached']:.3f}",
                t["target"],
                "yes" if t["is_met"] else "**no**",
            ]
            for t in targets
        ]
        found.append(markdown_table(("SLO", "figure", "reached", "target", "met"), cells))
    return found


def _cells(row: Mapping[str, Any]) -> list[str]:
    def of(kind: str, name: str, form: str) -> str:
        spread = row[kind].get(name)
        return "–" if spread is None else form.format(spread["median"])

    return [
        f"{row['load']:g}",
        f"{row['system']} {row['slo']}".strip(),
        of("figures", "p99_ttft_ms", "{:.0f}"),
        of("ratios", "p99_ttft_ms", "{:.2f}"),
        of("figures", "p99_itl_ms", "{:.1f}"),
        of("ratios", "p99_itl_ms", "{:.2f}"),
        of("figures", "mean_tpot_ms", "{:.1f}"),
        of("ratios", "mean_tpot_ms", "{:.2f}"),
        of("figures", "attainment", "{:.1%}"),
        of("figures", "offline_tokens_per_s", "{:.0f}"),
        of("ratios", "offline_tokens_per_s", "{:.2f}"),
    ]


if __name__ == "__main__":
    sys.exit(run_step(measure))
