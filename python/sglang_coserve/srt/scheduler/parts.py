"""Creates the co-serving parts of a scheduler and connects them."""

from __future__ import annotations

import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.advisory import Advisory
from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.latency_model import LatencyProfile
from sglang_coserve.core.request import Ending
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import OnlineOrder, Overload, SchedulerConfig
from sglang_coserve.lines.task_supervisor import TaskSupervisor
from sglang_coserve.recording.scheduler import SchedulerSetup
from sglang_coserve.srt import compat
from sglang_coserve.srt.admission.admission import Admission, FailedPlan
from sglang_coserve.srt.kv_checkpoint.hooks import KvCheckpointing
from sglang_coserve.srt.kv_checkpoint.settings import why_off
from sglang_coserve.srt.monitoring.online_load import OnlineLoadInquirer
from sglang_coserve.srt.monitoring.plan_log import FailedPlans, recorded
from sglang_coserve.srt.monitoring.replica_load import LoadReporter
from sglang_coserve.srt.monitoring.status import SchedulerStatus
from sglang_coserve.srt.profiling.latency_source import latency_profile
from sglang_coserve.srt.safepoint.install import Installed
from sglang_coserve.srt.scheduler.live_requests import LiveRequests
from sglang_coserve.srt.scheduler.request_intake import RequestIntake
from sglang_coserve.srt.scheduler.request_moves import RequestMoves
from sglang_coserve.srt.steps.chunk_admission import ChunkAdmission
from sglang_coserve.srt.steps.clocks import RankClock, device_timer
from sglang_coserve.srt.steps.engine_view import EngineView
from sglang_coserve.srt.steps.kv_pools import KvPools
from sglang_coserve.srt.steps.offline_lane import OfflineLane
from sglang_coserve.srt.steps.offline_retraction import OfflineRetraction
from sglang_coserve.srt.steps.request_ledger import RequestLedger
from sglang_coserve.srt.steps.step_runner import StepRunner
from sglang_coserve.srt.steps.step_tracker import StepTracker

__all__ = ["CoserveParts"]

Req = Any

logger = logging.getLogger(__name__)


def core_setup(
    config: CoserveConfig, profile: LatencyProfile, engine: EngineSize
) -> SchedulerSetup:
    """Return the policy, the targets and the limits of ``config``.

    ``engine`` has the limits for the no-interference baseline.
    """
    return SchedulerSetup(
        policy=config.offline_policy,
        slos=config.slos(),
        config=SchedulerConfig(
            iteration_budget_s=_seconds(config.iteration_budget_ms),
            max_offline_requests=config.offline_max_running,
            online_order=OnlineOrder(config.online_order),
            overload=Overload(config.overload),
            utility_ratio=config.offline_utility_ratio,
            random_picks=config.offline_random_picks,
            refine=True,
        ),
        profile=profile,
        engine=engine,
    )


def failed_plans(setup: SchedulerSetup, config: CoserveConfig) -> FailedPlans:
    """Return what writes down what plans were made from that failed.

    It is beside the batches, as it is as confidential, or in a directory of this user's.
    """
    if config.coserve_data_dir is not None:
        return FailedPlans(setup, Path(config.coserve_data_dir) / "failed-plans")
    own = f"coserve-failed-plans-{os.getuid()}"
    return FailedPlans(setup, Path(tempfile.gettempdir()) / own)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


class CoserveParts:
    """The co-serving parts of one scheduler."""

    def __init__(
        self, scheduler: Any, config: CoserveConfig, clock: RankClock, installed: Installed
    ) -> None:
        """Create the parts of a scheduler that has loaded its model and has no requests yet.

        Raises:
            CoserveError: the latency profile cannot be used, or the recording cannot be written.
        """
        self.events: Counter[str] = Counter()
        """Counts of the events of offline requests so far."""

        self.background = TaskSupervisor()
        self.advisory = Advisory(self._switched_off)
        """Calls the parts that only observe and advise."""

        self.ledger = RequestLedger(scheduler.tree_cache)
        self.live = LiveRequests(scheduler, self.ledger, kept=self._kept, tell=self._tell)
        reason = why_off(config, on_cpu=scheduler.device == "cpu")
        if reason is not None and compat.is_first_rank(scheduler):
            logger.info("no KV checkpoints: %s", reason)
        self.checkpointing = KvCheckpointing(scheduler.tree_cache, reason)
        self.view = EngineView(scheduler, micro_batches=compat.parallel(scheduler).pp_size)
        self.pools = KvPools(scheduler)
        self.retraction = OfflineRetraction(scheduler, self.pools, self.view, self.events)
        self.chunks = ChunkAdmission(self.view, self.retraction, self.events, scheduler.page_size)
        is_planned = config.offline_policy != "fifo"
        clock.timer = device_timer(scheduler) if is_planned else None
        self.tracker = StepTracker(
            self.ledger,
            is_overlapped=clock.timer is not None,
            micro_batches=self.view.micro_batches,
        )
        lane = None
        if installed.safepoints is not None:
            lane = OfflineLane(
                scheduler,
                self.view,
                self.chunks,
                self.retraction,
                self.tracker,
                installed.safepoints.num_layers,
                self.events,
                self.live.answer_aborted,
            )
        self.runner = StepRunner(scheduler, installed, lane, clock.timer)
        self.admission = self._make_admission(scheduler, config, clock)
        self.moves = RequestMoves(
            scheduler,
            config.kv_move_dir,
            admission=self.admission,
            view=self.view,
            retraction=self.retraction,
            ledger=self.ledger,
            background=self.background,
            forget=self.live.forget,
        )
        self.intake = RequestIntake(
            scheduler,
            admission=self.admission,
            view=self.view,
            moves=self.moves,
            clock=clock,
            ledger=self.ledger,
            events=self.events,
            live=self.live,
        )
        self.load = LoadReporter(
            scheduler,
            config,
            admission=self.admission,
            view=self.view,
            pools=self.pools,
            ledger=self.ledger,
            runner=self.runner,
        )
        settings = compat.settings_of(scheduler.server_args)
        self.online_load = OnlineLoadInquirer(
            scheduler, self.pools, self.load, settings.decode_log_interval
        )
        self.status = SchedulerStatus(
            scheduler,
            config,
            admission=self.admission,
            ledger=self.ledger,
            view=self.view,
            load=self.load,
            runner=self.runner,
            checkpointing=self.checkpointing,
            background=self.background,
            events=self.events,
            num_unnoticed=lambda: self.live.num_unnoticed,
        )

    def _make_admission(self, scheduler: Any, config: CoserveConfig, clock: RankClock) -> Admission:
        core: Scheduler | None = None
        write_failed: FailedPlan | None = None
        if config.offline_policy != "fifo":
            profile = latency_profile(scheduler, config)
            setup = core_setup(config, profile, _engine_size(scheduler))
            core = setup.make(advisory=self.advisory)
            if compat.is_first_rank(scheduler):  # The others decide alike.
                write_failed = failed_plans(setup, config).write
                if config.record_plans is not None:
                    core = recorded(setup, config.record_plans, self.advisory)
        return Admission(
            scheduler,
            config,
            core,
            pools=self.pools,
            view=self.view,
            retraction=self.retraction,
            chunks=self.chunks,
            runner=self.runner,
            tracker=self.tracker,
            clock=clock,
            ledger=self.ledger,
            checkpointing=self.checkpointing,
            events=self.events,
            advisory=self.advisory,
            forget=self.live.forget,
            failed_plans=write_failed,
        )

    def _switched_off(self, part: str, error: Exception) -> None:
        logger.error(
            "%s has failed, and is off until the next start; requests are served without it",
            part,
            exc_info=error,
        )
        self.status.switched_off(part)

    def _kept(self) -> Iterator[Req]:
        """Yield every request that is kept anywhere, some twice. O(requests)."""
        yield from self.view.kept()
        yield from self.admission.kept()
        yield from self.moves.kept()

    def _tell(self, rid: str, ending: Ending) -> None:
        """Remove all state of a request that has ended."""
        self.admission.forget(rid, ending)
        self.ledger.forget(rid)
        self.checkpointing.forget(rid)
        self.runner.forget(rid)
        self.advisory.tell("status", self.status.forget, rid)
        self.intake.name_is_free(rid)


def _engine_size(scheduler: Any) -> EngineSize:
    """Return the limits within which SGLang composes its batches."""
    return EngineSize(
        chunk_tokens=scheduler.chunked_prefill_size or scheduler.max_prefill_tokens,
        max_requests=scheduler.max_running_requests,
        kv_tokens=scheduler.max_total_num_tokens,
        mixes_decodes=scheduler.is_mixed_chunk,
        micro_batches=compat.parallel(scheduler).pp_size,
    )
