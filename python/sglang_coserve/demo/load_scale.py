"""The bundled loads at the size of a GPU: they are made for a small model on a few CPU cores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.workload import TraceRequest, scale_rate

__all__ = ["LoadScale"]

_RATE: Final = 3.0
"""As many requests and output tokens as two CPU cores send, serve and time at a GPU's pace."""

_ONLINE_SHARE: Final = 0.2
"""Of the device's time, what online prompts take on average. In a burst of the bundled trace it is
twice as much, and the rest is there for offline work."""


@dataclass(frozen=True, slots=True)
class LoadScale:
    """How many times as many requests come per second, and how many times as long prompts are.

    Outputs stay as they are: what streams them is the host.
    """

    rate: float = 1.0
    prompts: float = 1.0

    @classmethod
    def for_device(
        cls, requests: Sequence[TraceRequest], latency_model: LatencyModel, chunk_tokens: int
    ) -> Self:
        """Return the scale at which a trace's prompts take their share of a device's time.

        Args:
            requests: The whole trace, which must not be empty.
            latency_model: Of the device.
            chunk_tokens: Prompt tokens that it computes in one step.
        """
        step_s = latency_model.predict(StepStats.of([(chunk_tokens, 0)], []))
        wanted_per_s = _ONLINE_SHARE * chunk_tokens / step_s
        seconds = (requests[-1].arrival_s - requests[0].arrival_s) / _RATE
        found_per_s = sum(request.prompt_tokens for request in requests) / seconds
        return cls(_RATE, wanted_per_s / found_per_s)

    def applied(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        """Return a trace at this scale, of which a request without a prompt stays one."""
        return (
            replace(request, prompt_tokens=math.ceil(request.prompt_tokens * self.prompts))
            for request in scale_rate(requests, self.rate)
        )

    @property
    def lines_in_one(self) -> int:
        """How many offline lines to join for prompts as many times as long."""
        return max(1, round(self.prompts))

    def __str__(self) -> str:
        if self == LoadScale():
            return ""
        return f", {self.rate:g} × as many per second, prompts {self.prompts:.1f} × as long"
