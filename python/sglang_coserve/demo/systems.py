"""The systems that the demo compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["ALONE", "OURS", "STOCK", "DemoSystem", "stock_chunk_tokens"]


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


_TUNED: Final = ("--enable-priority-scheduling", "--enable-mixed-chunk")

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


def stock_chunk_tokens(*, on_gpu: bool) -> int:
    """Return the chunk size with which stock SGLang's P99 TTFT is best at our offline rate.

    With the demo's model on a CPU it is the best of 128 to 2,048 (tag ``measurements-1``), with
    Llama-3.1-8B on an emulated H100 better than 2,048.
    """
    return 512 if on_gpu else 256
