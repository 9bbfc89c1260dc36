"""The systems that the demo compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["ALONE", "OURS", "STOCK", "DemoSystem"]

_CHUNK_TOKENS: Final = "256"
"""Of 128 to 2,048 it has the best P99 TTFT at our offline rate (docs/benchmarks.md)."""


@dataclass(frozen=True, slots=True)
class DemoSystem:
    """A server, and how both loads are sent to it."""

    name: str
    """In ``report.json``."""

    label: str
    is_ours: bool
    flags: tuple[str, ...] = ()
    has_offline: bool = True
    online_fields: Mapping[str, Any] = field(default_factory=dict)
    """Added to the body of every online request."""

    offline_fields: Mapping[str, Any] = field(default_factory=dict)
    """Added to the body of every offline line."""


_TUNED: Final = (
    *("--enable-priority-scheduling", "--enable-mixed-chunk"),
    *("--chunked-prefill-size", _CHUNK_TOKENS),
)

ALONE: Final = DemoSystem(
    "online_alone",
    "online alone",
    is_ours=False,
    flags=_TUNED,
    has_offline=False,
    online_fields={"priority": 100},
)
STOCK: Final = DemoSystem(
    "stock",
    "stock SGLang, tuned",
    is_ours=False,
    flags=_TUNED,
    # The larger number goes first; a difference above 10 preempts running requests.
    online_fields={"priority": 100},
    offline_fields={"priority": 0},
)
OURS: Final = DemoSystem("coserve", "sglang_coserve", is_ours=True)
