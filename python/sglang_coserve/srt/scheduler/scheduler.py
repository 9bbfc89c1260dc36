"""SGLang's scheduler with offline requests beside online ones.

The only subclass of it, on top of what ``compat.hooked_scheduler`` makes of it. Each override
delegates to a part (``parts``), and passes SGLang's own method on where needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.io_struct import AbortReq, GetInternalStateReqOutput
from sglang.srt.managers.scheduler import Scheduler
from sglang.utils import TypeBasedDispatcher

from sglang_coserve.config import CoserveConfig
from sglang_coserve.srt import compat
from sglang_coserve.srt.forward_kind import has_online_prompts
from sglang_coserve.srt.monitoring.online_load import ReportingLoadInquirer
from sglang_coserve.srt.monitoring.scheduler_query import STATE_KEY, STATUS
from sglang_coserve.srt.optional_parts import GUARD
from sglang_coserve.srt.safepoint.safepoints import install_safepoints
from sglang_coserve.srt.scheduler.parts import CoserveParts
from sglang_coserve.srt.scheduler.undecodable import refuse_undecodable
from sglang_coserve.srt.steps.clocks import RankClock, RankTime
from sglang_coserve.srt.steps.offline_lane import SUSPENDED

Req = Any
ScheduleBatch = Any


def config_of(server_args: Any) -> CoserveConfig:
    """Return the co-serving settings attached to SGLang's ``ServerArgs``."""
    config = getattr(server_args, "_coserve", None)
    assert isinstance(config, CoserveConfig), "ServerArgs carries no co-serving settings"
    return config


_Hooked: Any = compat.hooked_scheduler(Scheduler)


class CoserveScheduler(_Hooked):
    """SGLang's scheduler with co-serving; runs in the scheduler process of each rank."""

    # SGLang's attributes that are assigned here.
    request_receiver: Any
    load_inquirer: Any
    metrics_reporter: Any
    input_blocker: Any
    recv_from_tokenizer: Any

    _began_offline_alone = False
    """The batch being processed had prompts, and no online ones."""

    # --- Set-up, in the order in which SGLang calls it -------------------------------------

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Start SGLang's scheduler and load the model; then create the parts."""
        super().__init__(*args, **kwargs)
        config = config_of(self.server_args)
        self.parts = CoserveParts(self, config, self._rank_clock, self._safepoints)

    def init_watch_dog_memory_saver_input_blocker(self) -> None:
        """Broadcast rank 0's time if there are several ranks: decisions depend on time."""
        super().init_watch_dog_memory_saver_input_blocker()
        self._rank_clock = RankClock(
            is_shared=compat.num_ranks(self) > 1,
            is_source=compat.is_first_rank(self),
        )
        self.input_blocker = self._rank_clock.carried_by(self.input_blocker)

    def init_request_dispatcher(self) -> None:
        """Handle ticks in the broadcast."""
        super().init_request_dispatcher()
        self._request_dispatcher += TypeBasedDispatcher([(RankTime, self._rank_clock.take)])

    def init_metrics_reporter(self, *args: Any, **options: Any) -> None:
        """Let SGLang's metrics, too, say what online requests find."""
        super().init_metrics_reporter(*args, **options)
        collector = self.metrics_reporter.metrics_collector
        if collector is not None:
            log_stats = collector.log_stats

            def log_online(stats: Any) -> None:
                self.parts.advisory.tell("load", self.parts.online_load.put_into, stats)
                log_stats(stats)

            collector.log_stats = log_online

    def init_grammar_manager(self) -> None:
        """Set up grammars as SGLang does, with a bounded cache."""
        super().init_grammar_manager()
        if (backend := self.grammar_manager.grammar_backend) is not None:
            backend.cache = GUARD.grammar_cache(backend.cache)

    def init_request_receiver(self) -> None:
        """Install safepoints in the model, where requests are received, too, if there are some."""
        self._safepoints = install_safepoints(self, config_of(self.server_args))
        if self._safepoints.inbox is not None:
            self.recv_from_tokenizer = self._safepoints.inbox
        refuse_undecodable(self)
        super().init_request_receiver()

    def init_load_inquirer(self) -> None:
        """Publish the load as online requests find it, with ours."""
        super().init_load_inquirer()
        self.load_inquirer = ReportingLoadInquirer.like(
            self.load_inquirer, lambda: self.parts.online_load
        )

    def init_invariant_checker(self) -> None:
        """Make SGLang's memory check count the requests outside of its batches, too."""
        super().init_invariant_checker()
        self.invariant_checker.get_running_batch = lambda: self.parts.queues.counted_requests()

    # --- Requests arrive and leave -------------------------------------------------------

    def handle_generate_request(self, recv_req: Any, **options: Any) -> None:
        """Accept a request, or refuse it."""
        take_in = partial(super().handle_generate_request, **options)
        self.parts.intake.take_in(recv_req, take_in)

    def handle_embedding_request(self, recv_req: Any, **options: Any) -> None:
        """Accept a request for an embedding, or refuse it."""
        take_in = partial(super().handle_embedding_request, **options)
        self.parts.intake.take_in(recv_req, take_in)

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        self.parts.intake.enqueue(req, is_retracted, super()._add_request_to_queue)

    def abort_request(self, recv_req: AbortReq) -> None:
        """Abort requests in any state, including waiting offline ones."""
        self.parts.intake.abort(recv_req, super().abort_request)

    def on_idle(self) -> None:
        """Publish metrics, and look for requests that are still known though none is left."""
        super().on_idle()
        self.parts.observe()
        self.parts.endings.idle()

    # --- One step ------------------------------------------------------------------------

    def run_event_loop(self) -> None:
        """Run SGLang's event loop, which receives requests when the next step has to be planned."""
        receive, pacer = self.request_receiver.recv_requests, self._rank_clock.pacer
        if pacer is not None:

            def wait_and_receive(*args: Any, **options: Any) -> Any:
                pacer.wait()
                return receive(*args, **options)

            self.request_receiver = SimpleNamespace(recv_requests=wait_and_receive)
        super().run_event_loop()

    def get_next_batch_to_run(self, running_batch: ScheduleBatch, last_batch: Any) -> Any:
        """Run one scheduling round, and report to the parts which batch it launches."""
        self.parts.endings.begin_round()
        self.parts.queues.begin_turn()
        last_batch = self.parts.lane.settle(last_batch)
        plan = super().get_next_batch_to_run(running_batch=running_batch, last_batch=last_batch)
        if plan.batch_to_run is None:
            self.parts.moves.yield_to_threads()
        self.parts.queues.end_turn(plan.batch_to_run)
        self.parts.tracker.launched(plan.batch_to_run)
        self.parts.endings.settle()
        return plan

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> Any:
        """Let requests leave and come, and the admission decide what to prefill."""
        self.parts.endings.settle()
        self.parts.moves.step(running_batch)
        return self.parts.admission.admit(running_batch, super().get_new_batch_prefill)

    def adapters_in_use(self) -> set[str | None]:
        """Return the adapters of all requests: those of both lanes may end up in one batch."""
        last = self.last_batch.reqs if self.last_batch else ()
        requests = (*self.parts.queues.requests_with_kv(self.running_batch), *last)
        return {request.lora_id for request in requests if not request.finished()}

    def update_running_batch(self, batch: ScheduleBatch) -> Any:
        """Before a decode step, retract offline requests so that SGLang need not choose victims."""
        self.parts.retraction.make_room_for_decodes(batch)
        return super().update_running_batch(batch)

    def is_disable_overlap_for_batch(
        self, batch: ScheduleBatch | None, last_batch: ScheduleBatch | None
    ) -> bool:
        """Process the last batch's results before a batch that may be suspended runs."""
        if self.parts.lane.needs_results(batch, self.parts.admission.stops):
            return True
        return bool(super().is_disable_overlap_for_batch(batch, last_batch))

    def run_batch(self, batch: ScheduleBatch, pp_proxy_tensors: Any = None) -> Any:
        """Run a batch, which may be suspended at a safepoint."""
        self.parts.tracker.runs(time.perf_counter(), self._rank_clock.paced_s)
        forward = partial(super().run_batch, pp_proxy_tensors=pp_proxy_tensors)
        run = partial(self.parts.lane.run, batch, self.parts.admission.stops, forward)
        return self._rank_clock.timed(run, has_prefills=batch.forward_mode.is_extend())

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        """Let SGLang process and send the results of a batch, and note its requests."""
        if self._rank_clock.pacer is not None:
            self._rank_clock.pacer.ended(result)
        if result is SUSPENDED:
            self.parts.tracker.stopped()
            return
        reqs = list(batch.reqs)
        GUARD.mend_results(batch, result)
        has_prompts = batch.forward_mode.is_extend()
        self._began_offline_alone = has_prompts and not has_online_prompts(batch)
        super().process_batch_result(batch, result)
        self._began_offline_alone = False
        self.parts.kv_store.computed(batch)
        self.parts.tracker.processed(reqs, time.perf_counter())
        self.parts.observe()

    def publish_load_snapshot(self, force: bool = False) -> Any:
        """Publish the load; after steps with offline prompts alone as often as after decodes."""
        return super().publish_load_snapshot(force and not self._began_offline_alone)

    def flush_cache(self, empty_cache: bool = True) -> bool:
        """Empty the prefix cache of the baseline with SGLang's."""
        is_flushed = bool(super().flush_cache(empty_cache))
        if is_flushed:
            self.parts.admission.flushed()
        return is_flushed

    def all_requests(self) -> set[Req]:
        """Return every request, for each to note which of its tokens come from old weights."""
        return {live.req for live in self.parts.requests}

    def pause_generation(self, recv_req: Any) -> None:
        """Drop the suspended step, and let SGLang retract paused and parked requests, too."""
        self.parts.admission.give_up()
        if recv_req.mode != "in_place":
            self.parts.queues.give_back(self.parts.lane.take_launched())
        super().pause_generation(recv_req)

    # --- Queries -------------------------------------------------------------------------

    def is_idle(self, of_sglang: bool, for_health_check: bool) -> bool:
        """Return whether the engine is idle, where waiting offline requests count as work until
        offline work has stopped.

        They do not count for the health check, which asks whether a batch is about to report
        results.
        """
        if for_health_check:
            return of_sglang
        return of_sglang and not self.parts.admission.has_work and not len(self.parts.moves)

    def may_flush(self, of_sglang: Callable[[], bool]) -> bool:
        """Return whether the paused engine may flush its cache: waiting requests that hold KV
        still count as work."""
        if self.enable_hierarchical_cache:
            # A paused engine runs no rounds, which alone note that copies have ended. All ranks
            # come here at the same point, as SGLang asks for it only where a message says so.
            self.tree_cache.check_hicache_events()
        has_kv = any(self.parts.queues.requests_with_kv(self.running_batch))
        return of_sglang() and not has_kv and not len(self.parts.moves)

    def get_internal_state(self, recv_req: Any) -> Any:
        """Add the state of both classes, by which it is known that this scheduler is in place."""
        parts = self.parts
        if (answered := parts.status.answer(recv_req.rid, parts.moves.ask)) is not None:
            return GetInternalStateReqOutput(internal_state=answered)
        output = super().get_internal_state(recv_req)
        state = parts.advisory.ask(STATUS, parts.status.internal_state, {})
        output.internal_state[STATE_KEY] = {"off": dict(parts.advisory.off), **state}
        return output
