"""The engines that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sglang_coserve.bench_serving import stock


@dataclass(frozen=True, slots=True)
class EngineSystem:
    """One of them; stock SGLang where ``coserve`` is None."""

    coserve: Mapping[str, Any] | None = None
    """Settings of ``CoserveConfig``."""

    flags: Mapping[str, Any] = field(default_factory=dict)
    """Of ``ServerArgs``."""

    has_offline: bool = True
    takes_slo: bool = False


ALONE: Final = "online alone"

SYSTEMS: Final[Mapping[str, EngineSystem]] = {
    ALONE: EngineSystem(has_offline=False),
    "coserve": EngineSystem(coserve={"offline_policy": "coserve"}, takes_slo=True),
    "coserve, slowdown 10%": EngineSystem(
        coserve={"offline_policy": "coserve", "online_slowdown": "10%"}
    ),
    **{
        f"stock, chunks of {tokens}": EngineSystem(flags=stock.tuned(tokens))
        for tokens in stock.CHUNK_TOKENS
    },
}
"""By name; latencies are divided by those of ``ALONE``."""
