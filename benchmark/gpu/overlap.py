"""Step ``overlap``: scheduling overhead of an iteration, with overlap scheduling and without."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from coserve_bench.table import markdown_table
from gpu.record import read_json
from gpu.task import Task, run_step
from sglang_coserve.errors import ServerError

_BENCH: Final = Path(__file__).resolve().parent.parent / "bench_overhead.py"
_SYSTEMS: Final = tuple(
    f"{who} overlap {how}" for who in ("coserve", "stock") for how in ("on", "off")
)
_SPARE_S: Final = 20.0
_BATCH: Final = 32
"""Rows of the benchmark's batches: no larger decode graphs are captured."""

TARGET_SHARE: Final = 0.02
TARGET_MS: Final = 0.5


def measure(task: Task) -> bool:
    """Run ``bench_overhead.py`` on the model; all systems at once in the GPU's memory."""
    out = task.folder / "overhead.json"
    out.unlink(missing_ok=True)
    settings = task.engine_settings()
    if task.dry_run:
        # On a CPU the schedulers' own defaults serve.
        settings, counts = {}, {"rounds": 1, "passes": 10, "limit-s": 5}
        waiting = ["100"]
    else:
        settings |= {"cuda_graph_max_bs_decode": _BATCH}
        counts, waiting = {"rounds": 3, "passes": 100, "limit-s": 10}, ["100", "10000"]
    command = [sys.executable, str(_BENCH), "--systems", *_SYSTEMS, "--waiting", *waiting]
    command += [str(x) for name, value in counts.items() for x in (f"--{name}", value)]
    command += ["--model-path", str(task.model_path()), "--settings", json.dumps(settings)]
    code = task.run([*command, "--out", str(out)], spare_s=_SPARE_S)
    found = read_json(out)
    if found is None:
        raise ServerError(f"bench_overhead.py ended with {code} and no figures; see the log")
    ours = [row for row in found["rows"] if "overhead_ms" in row]
    figures = {
        "rows": found["rows"],
        "target_share": TARGET_SHARE,
        "target_ms": TARGET_MS,
        "is_met": all(
            row["share"] <= TARGET_SHARE and row["overhead_ms"]["median"] <= TARGET_MS
            for row in ours
        ),
    }
    task.report(figures, table(found["rows"]))
    return True


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what a pass costs beyond SGLang's, beside the iterations of both."""
    columns = (
        *("system", "waiting", "iteration, median (ms)", "pass, median (ms)", "P99"),
        *("of it ours, median (ms)", "P99", "share of the iteration"),
    )
    cells = []
    for row in rows:
        ours = row.get("overhead_ms")
        cells.append(
            [
                row["system"],
                f"{row['waiting']:,}",
                f"{row['iteration_ms']['median']:.2f}",
                *(f"{row['pass_ms'][name]:.3f}" for name in ("median", "p99")),
                *(f"{ours[name]:.3f}" if ours else "–" for name in ("median", "p99")),
                f"{row['share']:.2%}",
            ]
        )
    note = (
        f"Targets: at most {TARGET_SHARE:.0%} of the iteration and {TARGET_MS} ms. The share of "
        "stock SGLang is that of its whole pass."
    )
    return f"{markdown_table(columns, cells)}\n\n{note}"


if __name__ == "__main__":
    sys.exit(run_step(measure))
