"""Creates the co-serving parts of a scheduler and connects them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.request import Ending
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import Overload, SchedulerConfig
from sglang_coserve.latency_profile import LatencyProfile
from sglang_coserve.lines.background import TaskSupervisor
from sglang_coserve.recording.calls import SchedulerSetup
from sglang_coserve.srt import compat
from sglang_coserve.srt.admission.admission import Admission
from sglang_coserve.srt.admission.chunk_limits import install_chunk_limits
from sglang_coserve.srt.forward_kind import runs_ahead
from sglang_coserve.srt.monitoring.online_load import OnlineLoad
from sglang_coserve.srt.monitoring.plan_log import recorded
from sglang_coserve.srt.monitoring.replica_load import LoadReporter
from sglang_coserve.srt.monitoring.status import SchedulerStatus
from sglang_coserve.srt.optional_parts import KV_STORE, REQUEST_MOVES
from sglang_coserve.srt.profiling.latency_source import latency_profile
from sglang_coserve.srt.safepoint.safepoints import Safepoints
from sglang_coserve.srt.scheduler.request_endings import RequestEndings
from sglang_coserve.srt.scheduler.request_intake import RequestIntake
from sglang_coserve.srt.steps.clocks import RankClock
from sglang_coserve.srt.steps.engine_parts import EngineParts
from sglang_coserve.srt.steps.step_record import StepRecord

Req = Any

logger = logging.getLogger(__name__)


def core_setup(
    config: CoserveConfig, profile: LatencyProfile, engine: EngineSize
) -> SchedulerSetup:
    """Return the policy, the targets and the limits of ``config``.

    ``engine`` has the limits for the no-interference baseline.
    """
    budget_ms, objective = config.iteration_budget_ms, config.objective()
    return SchedulerSetup(
        policy=config.offline_policy,
        slos=objective.slos,
        config=SchedulerConfig(
            iteration_budget_s=None if budget_ms is None else budget_ms / 1e3,
            max_offline_requests=config.offline_max_running,
            overload=Overload(config.overload),
            stream_slowdown=objective.stream_slowdown,
            refine=True,
        ),
        profile=profile,
        engine=engine,
        policy_settings=config.policy_settings(),
    )


class CoserveParts(EngineParts):
    """The co-serving parts of one scheduler."""

    def __init__(
        self, scheduler: Any, config: CoserveConfig, clock: RankClock, safepoints: Safepoints
    ) -> None:
        """Create the parts of a scheduler that has loaded its model and has no requests yet.

        Raises:
            CoserveError: the latency profile cannot be used, or the recording cannot be written.
        """
        super().__init__(
            scheduler,
            config,
            clock,
            safepoints,
            kv_store=KV_STORE.store(scheduler.tree_cache, clock.waited),
            switched_off=self._switched_off,
            answer_aborted=lambda req: self.endings.answer_aborted(req),
        )
        self.background = TaskSupervisor()
        self._records: list[StepRecord] = []
        """Records that the observers have not seen."""

        self.endings = RequestEndings(scheduler, self.requests, kept=self._kept, tell=self._tell)
        self.admission = self._make_admission()
        self.moves = REQUEST_MOVES.moves(self, self.admission, self.background, self.endings.forget)
        self.intake = RequestIntake(self, self.admission, self.moves, self.endings)
        self.load = LoadReporter(self, self.admission, self.moves)
        self.online_load = OnlineLoad(self, self.load)
        self.status = SchedulerStatus(
            self,
            self.admission,
            self.load,
            self.background,
            lambda: self.endings.num_unnoticed,
            self.moves.figures,
        )

    def _make_admission(self) -> Admission:
        scheduler, config = self.scheduler, self.config
        setup = core_setup(config, latency_profile(scheduler, config), self._engine_size())
        install_chunk_limits(scheduler.chunked_prefill_size)
        core: Scheduler = setup.make(advisory=self.advisory)
        # The other ranks decide alike.
        if config.record_plans is not None and compat.is_first_rank(scheduler):
            core = recorded(setup, config.record_plans, self.advisory)
        return Admission(self, core, self.endings.forget, self._note)

    def _note(self, record: StepRecord) -> None:
        """Keep the record of a step for ``observe``."""
        # Its requests may be forgotten by then, and with them their spans.
        self.advisory.tell("spans", self.status.trace, record)
        self._records.append(record)

    def observe(self) -> None:
        """Let the observers take in the steps that have ended, and publish if that is due.

        To be called while the device is busy: between the arrival of requests and the launch of
        their step the observers would delay both.
        """
        records, self._records = self._records, []
        for record in records:
            for part, observe in self.status.observers():
                self.advisory.tell(part, observe, record)
        self.advisory.tell("status", self.status.publish_if_due)

    def _switched_off(self, part: str, error: Exception) -> None:
        logger.error(
            "%s has failed, and is off until the next start; online requests are served without it",
            part,
            exc_info=error,
        )
        self.status.switched_off(part)

    def _kept(self) -> Iterator[Req]:
        """Yield every request that is kept anywhere, some twice. O(requests)."""
        yield from self.queues.kept()
        yield from self.admission.kept()
        yield from self.moves.kept()

    def _tell(self, rid: str, ending: Ending) -> None:
        """Remove all state of a request that has ended."""
        self.admission.forget(rid, ending)
        self.requests.forget(rid)
        self.kv_store.forget(rid)
        self.lane.safepoints.stats.forget(rid)
        self.intake.name_is_free(rid)

    def _engine_size(self) -> EngineSize:
        """Return the limits within which SGLang composes its batches."""
        scheduler = self.scheduler
        return EngineSize(
            chunk_tokens=scheduler.chunked_prefill_size or scheduler.max_prefill_tokens,
            max_requests=scheduler.max_running_requests,
            kv_tokens=scheduler.max_total_num_tokens,
            page_tokens=scheduler.page_size,
            keeps_prefixes=self.keeps_prefixes,
            mixes_decodes=scheduler.is_mixed_chunk,
            overlaps=runs_ahead(scheduler),
            micro_batches=compat.parallel(scheduler).pp_size,
        )
