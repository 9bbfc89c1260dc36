"""The default policy, which combines ideas of all four papers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from sglang_coserve.core.offline_queue import OfflineQueueConfig
from sglang_coserve.core.planning.offline_phase import serve_offline
from sglang_coserve.core.planning.online_phase import serve_online
from sglang_coserve.core.planning.step_builder import StepBuilder
from sglang_coserve.core.policy import Policy
from sglang_coserve.core.ranges import SHARE


@dataclass
class CoservePolicy(Policy):
    """Token-level packing under the deadlines of the requests themselves.

    - From ConServe: a chunk is as long as a context-aware model allows, to the
      token (§4.2), and the batch without online traffic is the one with the
      highest throughput.
    - From BROS: the budget is the time left until the next deadline of any online
      request, TTFT and TPOT alike (§IV-B), not one TBT for all. So offline work
      uses slack where there is some, and does not delay an urgent first token.
      Unlike BROS, no online request waits for an offline one.
    - From HyGen: a budget found by test runs can bound the step as well, since
      per-token deadlines do not by themselves ensure a mean or a percentile (§4.2); the queue
      shares prefixes, with freshness (§4.3, A.3).
    - From OOCO: under overload, requests that can no longer meet their target may be shed
      (§3.4.4).

    Beyond the papers: a step with offline work is no longer than a request
    that arrives during it may wait (``Allowance.arrival_s``),
    so that TTFT targets are also met where a step cannot be suspended. Conversations stay
    cached: offline requests leave KV to their prefixes.
    """

    name: ClassVar[str] = "coserve"
    averages_tpot: ClassVar[bool] = True
    protects_prefixes: ClassVar[bool] = True

    utility_ratio: Annotated[float, SHARE] = OfflineQueueConfig().utility_ratio
    """Probability that a pick from the queue follows the prefix order, not the age."""

    def queue_config(self, seed: int = 0) -> OfflineQueueConfig:
        """See ``Policy.queue_config``: prefixes, freshness and deadlines."""
        return OfflineQueueConfig(utility_ratio=self.utility_ratio, seed=seed)

    def compose(self, batch: StepBuilder) -> None:
        """See ``Policy.compose``."""
        serve_online(batch, batch.context.config.iteration_budget_s or math.inf)
        serve_offline(batch, efficiently=True)
