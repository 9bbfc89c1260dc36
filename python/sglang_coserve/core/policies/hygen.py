"""HyGen: a searched latency budget, chunk and memory budgets, prefix sharing (Sun et al.)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from sglang_coserve.core.offline_queue import OfflineQueueConfig
from sglang_coserve.core.planning.offline_phase import serve_offline
from sglang_coserve.core.planning.online_phase import decode_online, prefill_online
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.policy import Policy
from sglang_coserve.core.ranges import POSITIVE, SHARE
from sglang_coserve.core.step import Bound


@dataclass
class HygenPolicy(Policy):
    """Two-phase scheduling under three budgets.

    Algorithm 2 calls Algorithm 1 twice, first with the online requests, then with
    the offline ones, on what is left of

    - t, the latency budget L, found by test runs so that the overall SLO holds
      (§4.2; ``simulator.find_budget``). It is ``SchedulerConfig.iteration_budget_s``;
      without it the TPOT target, the simple strategy of Fig. 7;
    - c, the chunk size C;
    - m, the memory: online requests may also take the memory of offline ones, M_off.

    Online decodes run even over budget (Algorithm 1, line 8). Offline requests
    come in prefix order with freshness (§4.3, Algorithms 3 and 4): the offline
    queue. L holds at all times, also without online traffic.

    Differences from the paper: it subtracts each request's predicted latency from t;
    here the batch is predicted as a whole, which is exact for terms that are
    not additive. Line 9 of Algorithms 3 and 4 breaks when ``t > t_req``, that is
    while there is budget; we follow Algorithm 1, which admits while ``t_req <= t``.
    The first tokens of a retracted request stay in the prefix cache. Targets that requests
    bring along bound a step in addition to L.
    """

    name: ClassVar[str] = "hygen"

    step_prefill_tokens: Annotated[int, POSITIVE] = 512
    """C: prefill tokens of a step, both phases together."""

    utility_ratio: Annotated[float, SHARE] = 0.95
    """u of Algorithm 4; 1 is plain PSM (Algorithm 3)."""

    def queue_config(self, seed: int = 0) -> OfflineQueueConfig:
        """See ``Policy.queue_config``: prefixes, freshness and deadlines, which have no limit."""
        return OfflineQueueConfig(
            utility_ratio=self.utility_ratio,
            max_overtakes=None,
            longest_first=False,
            seed=seed,
        )

    def compose(self, batch: StepBuilder) -> None:
        """See ``Policy.compose``."""
        config = batch.context.config
        fixed_s = config.iteration_budget_s or math.inf
        batch.limit_offline(fixed_s * batch.context.timely, Bound.BUDGET)
        budget_s = config.iteration_budget_s or batch.targets.token_s or math.inf
        budget_s = min(budget_s, batch.least_tpot_s(budget_s))
        decode_online(batch)
        spare_tokens = max(batch.free_tokens - self.step_prefill_tokens, 0)
        batch.limit_tokens(self.step_prefill_tokens)
        prefill_online(batch, budget_s * batch.context.timely)
        # Decodes do not count towards the chunk size.
        batch.free_tokens += min(len(batch.offline_decodes), spare_tokens)
        serve_offline(batch)
