"""What all parts of a scheduler work with: its requests, batches, memory and clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.advisory import Advisory
from sglang_coserve.core.policies import POLICIES
from sglang_coserve.srt import compat
from sglang_coserve.srt.forward_kind import runs_ahead
from sglang_coserve.srt.kv_store import KvStore
from sglang_coserve.srt.marks.request_marks import is_offline
from sglang_coserve.srt.safepoint.safepoints import Safepoints
from sglang_coserve.srt.steps.clocks import LaunchPacer, RankClock, device_timer
from sglang_coserve.srt.steps.engine_queues import EngineQueues
from sglang_coserve.srt.steps.engine_requests import EngineRequests
from sglang_coserve.srt.steps.kv_pools import KvPools
from sglang_coserve.srt.steps.offline_lane import OfflineLane
from sglang_coserve.srt.steps.offline_retraction import OfflineRetraction
from sglang_coserve.srt.steps.prefix_leases import EVICTION_POLICY, PrefixLeases
from sglang_coserve.srt.steps.snapshots import Snapshots
from sglang_coserve.srt.steps.step_tracker import StepTracker

Req = Any
ScheduleBatch = Any

_FLASHINFER_PREFILLS: Final = frozenset(
    ("flashinfer", "flashmla", "cutlass_mla", "trtllm_mla", "cutedsl_mla", "tokenspeed_mla")
)
"""Attention backends that let FlashInfer prepare prefills, some of them only within graphs."""


def launches_that_wait(scheduler: Any) -> Callable[[bool, bool], bool]:
    """Return a function that says whether the launch of a step waits for the step before.

    It is told what ``LaunchPacer`` asks. A launch waits where lengths are copied from the device:
    for prefills under FlashInfer, or of layers with a state; for FlashInfer's decodes outside of
    CUDA graphs; for all of its decodes where a sliding window has a pool of its own.
    """
    runner = scheduler.tp_worker.model_runner
    has_states = isinstance(scheduler.req_to_token_pool, HybridReqToTokenPool)
    prefills_wait = (
        has_states
        or runner.prefill_attention_backend_str in _FLASHINFER_PREFILLS
        or getattr(runner.model, "prefill_launch_s", 0.0) > 0  # An emulated one.
    )
    decodes_wait = runner.decode_attention_backend_str == "flashinfer"
    has_window = scheduler.is_hybrid_swa

    def waits(has_prefills: bool, in_graph: bool) -> bool:
        return prefills_wait if has_prefills else decodes_wait and (has_window or not in_graph)

    return waits


class EngineParts:
    """The parts of one scheduler that know nothing of who is admitted when."""

    def __init__(
        self,
        scheduler: Any,
        config: CoserveConfig,
        clock: RankClock,
        safepoints: Safepoints,
        *,
        kv_store: KvStore,
        switched_off: Callable[[str, Exception], None],
        answer_aborted: Callable[[Req], None],
    ) -> None:
        """Create the parts of a scheduler that has loaded its model and has no requests yet.

        ``switched_off`` is told of parts that failed and are off; ``answer_aborted`` ends a request
        that is aborted in no batch.
        """
        self.scheduler = scheduler
        """SGLang's."""

        self.config = config
        # Looking a setting up takes as long as much of a plan.
        settings = compat.settings_of(scheduler.server_args)
        self.keeps_prefixes = not settings.disable_radix_cache
        self.keeps_conversations = (
            self.keeps_prefixes
            and settings.radix_eviction_policy == EVICTION_POLICY
            and POLICIES[config.offline_policy].protects_prefixes
        )
        """True when leases act (``PrefixLeases``)."""

        self.clock = clock
        self.events: Counter[str] = Counter()
        """Counts of the events of offline requests so far."""

        self.advisory = Advisory(switched_off)
        """Calls the parts that only observe and advise."""

        self.requests = EngineRequests()
        self.leases = PrefixLeases(scheduler.tree_cache, lambda req: not is_offline(req))
        self.kv_store = kv_store
        self.queues = EngineQueues(scheduler, micro_batches=compat.parallel(scheduler).pp_size)
        self.pools = KvPools(scheduler)
        self.retraction = OfflineRetraction(
            scheduler, self.pools, self.queues, self.events, answer_aborted
        )
        is_overlapped = runs_ahead(scheduler)
        prefills_wait = False
        if is_overlapped:
            waits = launches_that_wait(scheduler)
            prefills_wait = waits(True, True)
            if clock.is_source:
                clock.timer = device_timer(scheduler)
                clock.pacer = LaunchPacer(waits)
        self.tracker = StepTracker(
            self.requests,
            is_overlapped=is_overlapped,
            micro_batches=self.queues.micro_batches,
        )
        self.lane = OfflineLane(
            scheduler,
            self.queues,
            self.retraction,
            self.tracker,
            safepoints,
            answer_aborted,
            prefills_wait=prefills_wait,
        )
        self.snapshots = Snapshots(
            scheduler,
            self.requests,
            self.queues,
            self.pools,
            self.lane,
            keeps_prefixes=self.keeps_prefixes,
        )
