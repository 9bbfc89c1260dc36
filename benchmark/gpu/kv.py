"""Step ``kv``: checkpoints of offline KV on the GPU.

Bandwidth, reclaim, resume, what copies do to decode steps beside them, the race that the
design names (a page freed with a token in flight, and loaded into at once), and the
engine with checkpoints against without.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from coserve_bench.table import markdown_table
from gpu.parts import failed_parts, raise_for_failures, tried
from gpu.task import RefusedError, Task, run_step
from sglang_coserve.config import CoserveConfig
from sglang_coserve.srt import cpu

_NEEDED: Final = ("sglang_coserve.srt.kv_checkpoint", "kv_bench.bare_cache")
_LEAST_ENGINE_S: Final = 90.0

TARGET_GB_PER_S: Final = 40.0
"""ConServe reports 37 GB/s."""

TARGET_RECLAIM_MS: Final = 2.0
"""Of 40,000 tokens."""


def measure(task: Task) -> bool:
    """Measure part by part; report after each."""
    check_available()
    figures = {
        "target_gb_per_s": TARGET_GB_PER_S,
        "target_reclaim_ms": TARGET_RECLAIM_MS,
        **task.figures,
    }
    for page_tokens in (1, 16):
        name = f"page_{page_tokens}"
        if name not in figures or failed_parts(figures[name]):
            figures[name] = cache_parts(task, page_tokens)
            task.report(figures, *tables(figures))
    if "race" not in figures or failed_parts(figures["race"]):
        figures["race"] = race()
        task.report(figures, *tables(figures))
    serving = figures.setdefault("serving", [])
    for mode in ("off", "eager"):
        if any(row["mode"] == mode for row in serving):
            continue
        if task.remaining_s < _LEAST_ENGINE_S and not task.dry_run:
            return False
        from gpu.kv_serving import decode_throughput

        serving.append(decode_throughput(task, mode))
        task.report(figures, *tables(figures))
    raise_for_failures(figures)
    return True


def check_available() -> None:
    """See that this version has checkpoints at all.

    Raises:
        RefusedError: it has not.
    """
    missing = [name for name in _NEEDED if not _is_there(name)]
    fields = {field.name for field in dataclasses.fields(CoserveConfig)}
    if "kv_checkpoint" not in fields:
        missing.append("--kv-checkpoint")
    if missing:
        raise RefusedError(f"this version has no KV checkpoints: {', '.join(missing)} missing")


def cache_parts(task: Task, page_tokens: int) -> dict[str, Any]:
    """Measure the cache without a model, with pages of one size."""
    from gpu import kv_parts
    from gpu.kv_engine import KvEngine, KvShape

    if task.dry_run:
        shape = KvShape(layers=2, heads=1, head_dim=16, slots=2048, page_tokens=page_tokens)
        sizes = {"bulk": 512, "rows": 4, "steps": 3, "reclaim": 1024, "resume": 512, "repeats": 1}
    else:
        shape = KvShape(page_tokens=page_tokens)
        sizes = {"bulk": 8192, "rows": 64, "steps": 100}
        sizes |= {"reclaim": 40_000, "resume": 8192, "repeats": 5}
    engine, repeats = KvEngine(shape), sizes["repeats"]
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "bandwidth": lambda: kv_parts.bandwidth(engine, sizes["bulk"], repeats),
        "iteration": lambda: kv_parts.iteration_ms(engine, sizes["rows"], sizes["steps"]),
        "reclaim": lambda: kv_parts.reclaim(engine, sizes["reclaim"], 10, repeats),
        "resume": lambda: kv_parts.resume(engine, sizes["resume"], 4096, repeats),
    }
    if cpu.has_cuda():
        from gpu.kv_interference import decode_interference

        parts["interference"] = lambda: decode_interference(engine, task.model_path())
    return {name: tried(name, part) for name, part in parts.items()}


def race() -> dict[str, Any]:
    """Look for a write that comes after the load which took its page."""
    if not cpu.has_cuda():
        return {"left_out": "no CUDA device: there is one stream"}
    from gpu.kv_engine import KvEngine, KvShape
    from gpu.kv_interference import late_write

    engine = KvEngine(KvShape(slots=4096, context=8192))
    return {
        "as_it_is": tried("race", lambda: late_write(engine, 20, is_ordered=False)),
        "behind_the_pass": tried("race", lambda: late_write(engine, 20, is_ordered=True)),
    }


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def tables(figures: Mapping[str, Any]) -> list[str]:
    """Return the parts for each page size, the race and the engine."""
    cells = []
    for name, found in figures.items():
        if not name.startswith("page_"):
            continue
        for part, values in found.items():
            told = values.get("failed") or ", ".join(
                f"{key} {_short(value)}"
                for key, value in values.items()
                if not key.startswith("all")
            )
            cells.append([part, name.removeprefix("page_"), told])
    found_tables = [markdown_table(("part", "page", "found"), cells)] if cells else []
    if found := figures.get("race"):
        found_tables.append(f"Race: {found.get('left_out') or _race_told(found)}.")
    if serving := figures.get("serving"):
        rows = [[row["mode"], f"{row['output_tokens_per_s']:.0f}"] for row in serving]
        found_tables.append(markdown_table(("--kv-checkpoint", "offline output tokens/s"), rows))
    return found_tables


def _race_told(found: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{name.replace('_', ' ')}: "
        + (values.get("failed") or f"{values['corrupted']} of {values['trials']} overwritten")
        for name, values in found.items()
    )


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(run_step(measure))
