"""The load of a run: a section of an online trace, and offline requests that never run out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sglang_coserve.core.request import RequestClass
from sglang_coserve.errors import ConfigError
from sglang_coserve.simulator import Workload
from sglang_coserve.simulator.assemble import offline_requests
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.workload import (
    ContextFit,
    TraceRequest,
    fit_to_context,
    read_trace,
    sample_path,
    scale_rate,
    window,
)

__all__ = ["SearchLoad", "read_online"]


@dataclass(frozen=True, slots=True)
class SearchLoad:
    """The requests of both classes, for the simulator and for real clients."""

    online: Sequence[TraceRequest]
    offline: str
    """See ``simulator.assemble.offline_requests``."""

    offline_concurrency: int
    """Number of offline requests in the server at any time."""

    seconds: float
    """Offline tokens are counted up to this time; online requests arrive before it."""

    max_context_tokens: int
    cut: ContextFit
    """How the online requests were cut to the context length."""

    seed: int = 0

    def __str__(self) -> str:
        cut = self.cut.prompts_cut + self.cut.outputs_cut
        return (
            f"{len(self.online)} online requests in {self.seconds:g} s"
            + (f" ({cut} lengths cut to {self.max_context_tokens} tokens)" if cut else "")
            + f", offline {self.offline}, {self.offline_concurrency} at a time"
        )

    def simulated(self) -> Workload:
        """Return the load for a simulation.

        Raises:
            CoserveError: the offline requests cannot be read.
        """
        return Workload(
            online=partial(from_trace, self.online, RequestClass.ONLINE, seed=self.seed),
            offline=offline_requests(
                self.offline, max_context_tokens=self.max_context_tokens, seed=self.seed
            ),
            backlog_depth=self.offline_concurrency,
            interval_s=self.seconds,
        )


def read_online(
    trace: Path | None, *, rate: float, seconds: float | None, max_context_tokens: int
) -> tuple[list[TraceRequest], ContextFit]:
    """Return the first ``seconds`` of a trace (None: the bundled sample), cut to the context.

    The arrival rate is multiplied by ``rate``; without ``seconds`` the whole trace is used.

    Raises:
        CoserveError: the trace cannot be used, or no request is left.
    """
    scaled = scale_rate(read_trace(trace or sample_path("online")), rate)
    kept, cut = fit_to_context(window(scaled, 0.0, seconds or math.inf), max_context_tokens)
    if not kept:
        raise ConfigError(
            f"{trace or 'the bundled sample'}: no usable request in the part to serve: "
            "use a longer duration or a higher rate"
        )
    return kept, cut
