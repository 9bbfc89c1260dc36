"""The engines that are compared."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from packaging.version import Version

__all__ = ["ALONE", "SYSTEMS", "System"]


@dataclass(frozen=True, slots=True)
class System:
    """One of them; stock SGLang where ``coserve`` is None."""

    coserve: Mapping[str, Any] | None = None
    """Settings of ``CoserveConfig``."""

    flags: Mapping[str, Any] = field(default_factory=dict)
    """Of ``ServerArgs``."""

    has_offline: bool = True
    takes_slo: bool = False
    offline_asks: Mapping[str, Any] = field(default_factory=dict)
    """What offline requests ask for beside tokens: fields of ``SamplingParams``."""

    offline_logprobs: int = 0
    """How many log-probabilities each of their tokens comes with."""

    since: str = "0.5.17"
    """The first version of SGLang that has its flags."""

    @property
    def can_run(self) -> bool:
        """Whether the SGLang that is installed has its flags."""
        return Version(importlib.metadata.version("sglang")) >= Version(self.since)


def _stock(chunk_tokens: int) -> System:
    """Stock SGLang as an expert would run both loads on it.

    Online requests have the higher priority, and decodes ride with prompts.
    """
    flags = {"enable_priority_scheduling": True, "enable_mixed_chunk": True}
    return System(flags={**flags, "chunked_prefill_size": chunk_tokens})


def _interleaving(chunk_tokens: int) -> System:
    """Stock SGLang with a step of decodes alone after each of prefills."""
    flags = {"enable_priority_scheduling": True, "prefill_decode_interval": 1}
    return System(flags={**flags, "chunked_prefill_size": chunk_tokens}, since="0.5.19")


ALONE: Final = "online alone"

_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 40},
        "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 20},
    },
    "required": ["name", "numbers"],
}
"""Longer than the outputs, so that they are as long as without it."""

SYSTEMS: Final[Mapping[str, System]] = {
    ALONE: System(coserve={"offline_policy": "fifo"}, has_offline=False),
    "coserve": System(coserve={"offline_policy": "coserve"}, takes_slo=True),
    "coserve, JSON schemas": System(
        coserve={"offline_policy": "coserve"},
        takes_slo=True,
        offline_asks={"json_schema": json.dumps(_SCHEMA)},
    ),
    "coserve, log-probabilities": System(
        coserve={"offline_policy": "coserve"}, takes_slo=True, offline_logprobs=5
    ),
    "coserve, slowdown 10%": System(
        coserve={"offline_policy": "coserve", "online_slowdown": "10%"}
    ),
    "fifo": System(coserve={"offline_policy": "fifo"}),
    "non-preemptive": System(
        coserve={"offline_policy": "non_preemptive", "safepoint_interval": 0}, takes_slo=True
    ),
    **{f"stock, chunks of {tokens}": _stock(tokens) for tokens in (128, 256, 512, 2048)},
    **{f"stock, decodes between chunks of {n}": _interleaving(n) for n in (128, 256, 512)},
}
"""By name; latencies are divided by those of ``ALONE``."""
