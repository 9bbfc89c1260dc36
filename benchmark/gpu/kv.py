"""Checkpoints of offline KV on a GPU, the cache on its own: no model, KV of Llama-3.1-8B's shape.

    cd benchmark && python -m gpu.kv --model-path MODEL --out kv_gpu.json

With pages of 1 and of 16 tokens: bandwidth of a checkpoint, what a step of 64 decoding requests
spends, reclaim of 40,000 saved tokens, time to resume, and what copies do to decode steps beside
them (the matrix products of the model's layers). Then the race that the design names: a page that
is freed with a token in flight and loaded into at once. A part that fails costs none of the
others; what is in the file is not measured again. Without a GPU, or with ``--tiny``, a rehearsal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from common.machine import describe_machine
from common.results import measure_missing, write_json
from gpu import kv_parts
from gpu.kv_beside_decode import decode_interference, late_write
from gpu.kv_engine import KvEngine
from gpu.kv_pools import KvShape
from sglang_coserve.srt.cpu import defaults as cpu
from sglang_coserve.tables import markdown_table

TARGETS: Final = {"gb_per_s": 40.0, "reclaim_ms": 2.0}
"""ConServe reports 37 GB/s; the time is that of 40,000 tokens."""

Part = Callable[[], dict[str, Any]]


def main() -> int:
    """Measure what is not in the file yet; return 1 where a part failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", type=Path, required=True, help="for decode steps")
    parser.add_argument("--tiny", action="store_true", help="tiny counts, to find faults")
    parser.add_argument("--out", type=Path, required=True, metavar="JSON")
    options = parser.parse_args()
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    found |= {"machine": describe_machine(), "targets": TARGETS}
    figures: dict[str, dict[str, Any]] = found.setdefault("figures", {})
    write = partial(write_json, options.out, found)
    is_complete = True
    for page_tokens in (1, 16):
        is_complete &= measure_missing(parts_of(page_tokens, options), figures, write)
    if cpu.has_cuda():
        is_complete &= measure_missing(race(), figures, write)
    print(table(figures))
    return int(not is_complete)


def parts_of(page_tokens: int, options: argparse.Namespace) -> dict[str, Part]:
    """Return the parts with pages of one size, on one engine."""
    if options.tiny or not cpu.has_cuda():
        shape = KvShape(layers=2, heads=1, head_dim=16, slots=2048, page_tokens=page_tokens)
        sizes = {"bulk": 512, "rows": 4, "steps": 3, "reclaim": 1024, "resume": 512, "repeats": 1}
    else:
        shape = KvShape(page_tokens=page_tokens)
        # With larger pages each step adds more, and the pool holds them all.
        sizes = {"bulk": 8192, "rows": 64, "steps": 100 if page_tokens == 1 else 24}
        sizes |= {"reclaim": 40_000, "resume": 8192, "repeats": 5}
    engine, repeats = KvEngine(shape), sizes["repeats"]
    parts: dict[str, Part] = {
        "bandwidth": partial(kv_parts.bandwidth, engine, sizes["bulk"], repeats),
        "step": partial(kv_parts.step, engine, sizes["rows"], sizes["steps"], page_tokens),
        "reclaim": partial(kv_parts.reclaim, engine, sizes["reclaim"], 10, repeats),
        "resume": partial(kv_parts.resume, engine, sizes["resume"], 4096, repeats),
    }
    if cpu.has_cuda():
        parts["interference"] = partial(decode_interference, engine, options.model_path)
    return {f"{name}, page {page_tokens}": part for name, part in parts.items()}


def race() -> dict[str, Part]:
    """Return the search for a write that comes after the load which took its page."""
    engine = KvEngine(KvShape(slots=4096, context=8192))
    return {
        "race, as it is": partial(late_write, engine, 20, is_ordered=False),
        "race, behind the pass": partial(late_write, engine, 20, is_ordered=True),
    }


def table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a row for each part."""
    rows = [
        [
            name,
            ", ".join(
                f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in values.items()
                if not key.startswith("all")
            ),
        ]
        for name, values in figures.items()
    ]
    return markdown_table(("part", "found"), rows)


if __name__ == "__main__":
    sys.exit(main())
