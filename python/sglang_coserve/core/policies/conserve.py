"""ConServe: offline tokens up to the TBT target (Qiao et al., §4.2, Algorithm 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from sglang_coserve.core.planning.offline_phase import serve_offline
from sglang_coserve.core.planning.online_phase import decode_online, prefill_online
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.policy import Policy


@dataclass
class ConservePolicy(Policy):
    """SLO-aware token-level scheduling.

    Algorithm 1, invoked in each step, with one bound t_TBT on its latency:

    1. Online requests in order, each with as many tokens as the cost model allows; stop at none.
       If memory is short, paused offline requests are retracted.
    2. Offline requests the same way, but stop if memory is short.

    Without online traffic (§4.2, last paragraph) the batch is the one with the
    highest predicted throughput: every decode, and as many prefill tokens as
    give the most tokens per second. Requests that arrive during such a step are left to
    layer-wise preemption (§4.3), here ``core.planning.lanes``.

    Differences from the paper: t_TBT is the strictest target among the online decodes if requests
    bring their own, and a request's own TTFT target also bounds the step that computes it.
    Decodes come before prefills in both phases, because a decode that waits misses its target
    for one token's work. Unfinished prefills come before new ones, because the engine runs one
    at a time. Running offline requests are retracted, too, once no paused one is left.
    """

    name: ClassVar[str] = "conserve"
    lets_arrivals_wait: ClassVar[bool] = True

    def compose(self, batch: StepBuilder) -> None:
        """See ``Policy.compose``."""
        decode_online(batch)
        if batch.has_online:
            tbt_s = batch.least_tpot_s(batch.targets.token_s or math.inf)
            budget_s = tbt_s * batch.context.timely
            prefill_online(batch, budget_s)
        serve_offline(batch, efficiently=not batch.has_online)
