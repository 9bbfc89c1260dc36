"""Engines with safepoints, in every mode of SGLang that matters to a suspended step."""

from __future__ import annotations

from typing import Any

from srt.scripted_engine import EngineProcess
from srt.test_planned_scheduler import LOOSE

SUSPENDING = {**LOOSE, "safepoint_interval": 1}

Modes = tuple[bool, int, bool]
"""Overlap, page size, radix cache."""

MODES: dict[str, Modes] = {
    f"{loop}-page{page_size}-{cache}": (loop == "overlap", page_size, cache == "radix")
    for loop in ("normal", "overlap")
    for page_size in (1, 16)
    for cache in ("radix", "chunk")
}
QUICK = ("normal-page1-chunk", "overlap-page16-radix")
"""Each value of each mode once."""


def start(start_engine: Any, modes: str, **coserve: Any) -> EngineProcess:
    overlap, page_size, radix = MODES[modes]
    return start_engine(
        overlap=overlap,
        page_size=page_size,
        disable_radix_cache=not radix,
        coserve={**SUSPENDING, **coserve},
    )
