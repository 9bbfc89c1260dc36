"""Step ``safepoint``: what safepoints cost on a GPU, and how soon the GPU is free.

Four parts, the cheap ones first: ``bench_safepoint_gpu.py`` without SGLang (cost of a
safepoint, run-ahead depth), conditional nodes, decode graphs in groups, then the engine
with breakable and eager prefills. What is measured is not measured again.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from coserve_bench.table import markdown_table
from gpu.parts import raise_for_failures, tried
from gpu.record import read_json
from gpu.task import Task, run_step
from sglang_coserve.srt import cpu

_BENCHMARKS: Final = Path(__file__).resolve().parent.parent
_BENCH: Final = _BENCHMARKS / "bench_safepoint_gpu.py"
_CONDITIONAL: Final = _BENCHMARKS.parent / "sgl-kernel-patches" / "cuda" / "build.py"
_NO_DEVICE: Final = 77
"""Exit status of the conditional nodes' test program without a CUDA device."""

_PROGRAM_TIMEOUT_S: Final = 120.0
_LEAST_ENGINE_S: Final = 60.0

TARGETS: Final = {"safepoint_us": 10.0, "overhead_share": 0.01, "arrival_to_stop_p99_ms": 8.0}


def measure(task: Task) -> bool:
    """Measure part by part; report after each."""
    figures = {"targets": TARGETS, **task.figures}
    parts: dict[str, Callable[[Task], Any]] = {
        "stream": stream,
        "conditional_nodes": conditional_nodes,
        "decode_graphs": decode_graphs,
    }
    for name, part in parts.items():
        if "failed" in figures.get(name, {"failed": "not measured yet"}):
            figures[name] = tried(name, partial(part, task))
            task.report(figures, *tables(figures))
    graphs = ["eager"] if task.dry_run else ["breakable", "eager"]
    for kind in graphs:
        if task.remaining_s < _LEAST_ENGINE_S:
            return False
        figures.pop(f"{kind}_engine", None)
        try:
            code = engines(task, kind)
        finally:
            # Also after an interruption.
            figures["engine"] = (read_json(_results(task)) or {}).get("engine", {})
            task.report(figures, *tables(figures))
        if code:
            figures[f"{kind}_engine"] = {"failed": f"exit status {code}"}
            task.report(figures, *tables(figures))
        if code and task.remaining_s < _LEAST_ENGINE_S:
            return False  # Stopped by the time.
    raise_for_failures(figures)
    return True


def stream(task: Task) -> dict[str, Any]:
    """Return the matrix products of the model's layers under the real gate."""
    if not cpu.has_cuda():
        return {"left_out": "no CUDA device"}
    code = task.run([*_command(task), "--parts", "stream", "--intervals", "4", "8"])
    found = (read_json(_results(task)) or {}).get("stream")
    return found if found is not None else {"failed": f"exit status {code}; see the log"}


def engines(task: Task, graphs: str) -> int:
    """Measure the engine with one kind of prefills, with and without safepoints; return the
    exit status: a kind that fails must not keep the others from being tried."""
    return task.run([*_command(task), "--parts", "engine", "--graphs", graphs])


def conditional_nodes(task: Task) -> dict[str, Any]:
    """Build the safepoints that a CUDA graph takes by itself, and run their test program."""
    specification = importlib.util.spec_from_file_location("conditional_build", _CONDITIONAL)
    assert specification is not None and specification.loader is not None
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    if script.find_nvcc() is None:
        return {"left_out": "no nvcc"}
    try:
        _, program = script.build(task.folder / "conditional_node")
        done = subprocess.run([program], capture_output=True, text=True, timeout=_PROGRAM_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        return {"failed": error.stderr[-2000:]}
    except subprocess.TimeoutExpired:
        return {"failed": f"the test program did not end in {_PROGRAM_TIMEOUT_S:.0f} s"}
    if done.returncode == _NO_DEVICE:
        return {"left_out": "built; no CUDA device to run it on"}
    if done.returncode != 0:
        return {"failed": f"exit status {done.returncode}: {done.stderr[-2000:]}"}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def decode_graphs(task: Task) -> dict[str, Any]:
    """Return a decode step as one graph, and as one graph per group of layers."""
    if not cpu.has_cuda():
        return {"left_out": "no CUDA device"}
    from gpu.decode_graphs import measure_decode_graphs

    return measure_decode_graphs(task.model_path())


def _results(task: Task) -> Path:
    return task.folder / "safepoint_gpu.json"


def _command(task: Task) -> list[str]:
    command = [sys.executable, str(_BENCH), "--model-path", str(task.model_path())]
    command += ["--out", str(_results(task))]
    if task.dry_run:
        sizes = {"chunk-tokens": 256, "prompt-tokens": 256, "offline-requests": 2}
        sizes |= {"online-tokens": 16, "arrivals": 3, "interval": 2}
    else:
        command += ["--load-format", task.setting.load_format]
        command += ["--attention-backend", task.attention_backend]
        sizes = {"repeats": 8, "arrivals": 60}
    return [*command, *(str(x) for name, value in sizes.items() for x in (f"--{name}", value))]


def tables(figures: Mapping[str, Any]) -> list[str]:
    """Return a table for each part that gave figures, a line for each that did not."""
    shown = {
        "stream": stream_table,
        "conditional_nodes": plain_table,
        "decode_graphs": plain_table,
        "engine": engine_table,
    }
    found = []
    for name, show in shown.items():
        part = figures.get(name)
        if not part:
            continue
        title = name.replace("_", " ").capitalize()
        why_not = part.get("left_out") or part.get("failed")
        found.append(f"{title}: {why_not}." if why_not else f"{title}:\n\n{show(part)}")
    return found


def stream_table(part: Mapping[str, Any]) -> str:
    """Return passes with and without safepoints."""
    columns = (
        *("tokens", "every k layers", "run-ahead d", "pass (ms)", "overhead"),
        *("flag → free, P50 (ms)", "P99 (ms)"),
    )
    cells = []
    for row in part["passes"]:
        delay = row["flag_to_free_ms"] or {}
        cells.append(
            [
                *(str(row[name]) for name in ("tokens", "interval", "depth")),
                f"{row['pass_ms']:.2f}",
                f"{row['overhead_share']:+.2%}",
                *(f"{delay[p]:.1f}" if p in delay else "–" for p in ("p50", "p99")),
            ]
        )
    told = f"A safepoint keeps the host for {part['safepoint_us']:.1f} µs."
    return f"{markdown_table(columns, cells)}\n\n{told}"


def engine_table(part: Mapping[str, Any]) -> str:
    """Return the engine's passes and suspensions."""
    columns = (
        *("prefills", "safepoints", "offline µs/token", "TTFT idle P50 (ms)"),
        *("beside offline P50", "P99", "arrival → stop P50", "P99", "suspended"),
    )
    cells = []
    for row in part.values():
        state = row["safepoints"]
        delay = state.get("delays_ms", {}).get("arrival_to_stop", {})
        interval = f"every {row['interval']}" if row["interval"] else "none"
        reason = "" if state.get("enabled", True) else f" (off: {state.get('reason')})"
        cells.append(
            [
                row["graphs"],
                interval + reason,
                f"{row['offline_us_per_token']:.2f}",
                f"{row['idle_ttft_ms']['p50']:.1f}",
                *(f"{row['ttft_ms'][p]:.1f}" for p in ("p50", "p99")),
                *(f"{delay[p]:.1f}" if delay.get("n") else "–" for p in ("p50", "p99")),
                str(sum(state.get("suspended", {}).values())),
            ]
        )
    return markdown_table(columns, cells)


def plain_table(part: Mapping[str, Any]) -> str:
    """Return the figures by name."""
    cells = [[k, f"{v:.3f}" if isinstance(v, float) else str(v)] for k, v in part.items()]
    return markdown_table(("figure", "found"), cells)


if __name__ == "__main__":
    sys.exit(run_step(measure))
