"""SGLang's scheduler with a second class of requests behind the first.

The one subclass of it. Each override hands over to the part whose task it is (``parts``),
with SGLang's own method where that is needed.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

from sglang.srt.managers.io_struct import AbortReq, GetInternalStateReqOutput
from sglang.srt.managers.scheduler import Scheduler
from sglang.utils import TypeBasedDispatcher

from sglang_coserve.config import CoserveConfig
from sglang_coserve.srt import compat
from sglang_coserve.srt.grammar_cache import GrammarCache
from sglang_coserve.srt.load_snapshot import ReportingLoadInquirer
from sglang_coserve.srt.parts import CoserveParts
from sglang_coserve.srt.rank_clock import RankClock, Tick
from sglang_coserve.srt.replicas import STATE_KEY
from sglang_coserve.srt.safepoint.install import install_safepoints
from sglang_coserve.srt.scheduler_query import answer
from sglang_coserve.srt.step_runner import SUSPENDED
from sglang_coserve.srt.usable_logits import end_unusable

__all__ = ["CoserveScheduler", "config_of"]

Req = Any
ScheduleBatch = Any


def config_of(server_args: Any) -> CoserveConfig:
    """Return the co-serving settings that travel on SGLang's ``ServerArgs``."""
    config = getattr(server_args, "_coserve", None)
    assert isinstance(config, CoserveConfig), "ServerArgs carries no co-serving settings"
    return config


class CoserveScheduler(Scheduler):
    """See the module's docstring. Runs in the scheduler process, one per rank."""

    # State of SGLang's that is assigned here too.
    idle_sleeper: Any
    load_inquirer: Any
    metrics_reporter: Any
    input_blocker: Any
    recv_from_tokenizer: Any

    # --- Set-up, in the order in which SGLang calls it -------------------------------------

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Start SGLang's scheduler; then, with its model in place and nobody waiting, the parts."""
        super().__init__(*args, **kwargs)
        config = config_of(self.server_args)
        self.parts = CoserveParts(self, config, self._rank_clock, self._installed)

    def init_watch_dog_memory_saver_input_blocker(self) -> None:
        """Broadcast rank 0's clock where there are several ranks that decide by it."""
        super().init_watch_dog_memory_saver_input_blocker()
        is_planned = config_of(self.server_args).offline_policy != "fifo"
        self._rank_clock = RankClock(
            is_shared=is_planned and compat.num_ranks(self) > 1,
            is_source=compat.is_first_rank(self),
        )
        self.input_blocker = self._rank_clock.carried_by(self.input_blocker)

    def init_request_dispatcher(self) -> None:
        """Take ticks from the broadcast."""
        super().init_request_dispatcher()
        self._request_dispatcher += TypeBasedDispatcher([(Tick, self._rank_clock.take)])

    def init_metrics_reporter(self, *args: Any) -> None:
        """Let SGLang's metrics, too, say what online requests find."""
        super().init_metrics_reporter(*args)
        collector = self.metrics_reporter.metrics_collector
        if collector is not None:
            log_stats = collector.log_stats

            def log_online(stats: Any) -> None:
                self.parts.online_load.put_into(stats)
                log_stats(stats)

            collector.log_stats = log_online

    def init_grammar_manager(self) -> None:
        """Let SGLang set up grammars; bound how many it keeps."""
        super().init_grammar_manager()
        if self.grammar_manager.grammar_backend is not None:
            self.grammar_manager.grammar_backend.cache = GrammarCache()

    def init_request_receiver(self) -> None:
        """Put safepoints into the model, and let a thread receive what comes meanwhile."""
        self._installed = install_safepoints(self, config_of(self.server_args))
        if (ingress := self._installed.ingress) is not None:
            self.recv_from_tokenizer = ingress.inbox
            self.idle_sleeper = ingress.parking
        super().init_request_receiver()

    def init_load_inquirer(self) -> None:
        """Publish the load as online requests find it, with ours."""
        super().init_load_inquirer()
        self.load_inquirer = ReportingLoadInquirer.like(
            self.load_inquirer, lambda: self.parts.online_load, lambda: self.parts.load.load()
        )

    def init_invariant_checker(self) -> None:
        """Let the memory check of a busy engine count the rows beside SGLang's batches."""
        super().init_invariant_checker()
        self.invariant_checker.get_running_batch = lambda: self.parts.view.held_rows()

    # --- Requests arrive and leave -------------------------------------------------------

    def handle_generate_request(self, recv_req: Any, **options: Any) -> None:
        """Take a request in, or refuse it."""
        take_in = partial(super().handle_generate_request, **options)
        self.parts.intake.take_in(recv_req, take_in)

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        self.parts.intake.enqueue(req, is_retracted, super()._add_request_to_queue)

    def abort_request(self, recv_req: AbortReq) -> None:
        """Abort requests in every state; the waiting offline ones are ours to find."""
        self.parts.intake.abort(recv_req, super().abort_request)

    def on_idle(self) -> None:
        """Drop what is left of requests that SGLang refused by itself."""
        super().on_idle()
        self.parts.status.publish()
        if len(self.parts.ledger) and self.is_fully_idle():
            self.parts.forget_all()

    # --- One iteration -------------------------------------------------------------------

    def run_event_loop(self) -> None:
        """Receive requests as long as the event loop runs."""
        ingress = self._installed.ingress
        with nullcontext() if ingress is None else ingress.running():
            super().run_event_loop()

    def get_next_batch_to_run(self, running_batch: ScheduleBatch, last_batch: Any) -> Any:
        """Note the batch that a pass ends with."""
        self.parts.view.begin_turn()
        last_batch = self.parts.admission.settle(last_batch)
        plan = super().get_next_batch_to_run(running_batch=running_batch, last_batch=last_batch)
        self.parts.view.end_turn(plan.batch_to_run)
        self.parts.admission.launched(plan.batch_to_run)
        self.parts.status.launched(plan.batch_to_run)
        return plan

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> Any:
        """Let the admission decide what SGLang prefills."""
        return self.parts.admission.admit(running_batch, super().get_new_batch_prefill)

    def _can_schedule_lora_req(self, req: Req, running_loras: set[str | None]) -> bool:
        """Keep the places of the adapters of all rows: those of both lanes may come together."""
        return bool(super()._can_schedule_lora_req(req, running_loras | self._kept_loras()))

    def can_schedule_lora_req(self, req: Req, running_loras: set[str | None]) -> bool:
        """As ``_can_schedule_lora_req``, which has this name since SGLang 0.5.20."""
        return bool(super().can_schedule_lora_req(req, running_loras | self._kept_loras()))

    def _kept_loras(self) -> set[str | None]:
        last = self.last_batch.reqs if self.last_batch else ()
        rows = (*self.parts.view.rows_with_kv(self.running_batch), *last)
        return {row.lora_id for row in rows if not row.finished()}

    def update_running_batch(self, batch: ScheduleBatch) -> Any:
        """Before a decode step, evict offline rows rather than let SGLang pick victims."""
        self.parts.eviction.make_room_for_decodes(batch)
        return super().update_running_batch(batch)

    def is_disable_overlap_for_batch(
        self, batch: ScheduleBatch | None, last_batch: ScheduleBatch | None
    ) -> bool:
        """Take the last batch's results before one that may be suspended runs."""
        if self.parts.runner.needs_results(batch, self.parts.admission.terms):
            return True
        return bool(super().is_disable_overlap_for_batch(batch, last_batch))

    def run_batch(self, batch: ScheduleBatch, pp_proxy_tensors: Any = None) -> Any:
        """Run a batch, which may be suspended."""
        forward = partial(super().run_batch, pp_proxy_tensors=pp_proxy_tensors)
        return self.parts.runner.run(batch, self.parts.admission.terms, forward)

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        """Let SGLang send out what a batch came to, and tell the parts."""
        if result is SUSPENDED:
            self.parts.status.stopped(batch)
            self.parts.admission.stopped()
            return
        reqs = list(batch.reqs)
        before = [len(req.output_ids) for req in reqs]
        if batch.return_logprob:
            compat.fill_token_ids_logprobs(result.logits_output)
        end_unusable(batch, result)
        super().process_batch_result(batch, result)
        self.parts.checkpointing.processed(batch)
        has_token = [len(req.output_ids) > count for req, count in zip(reqs, before, strict=True)]
        self.parts.status.processed(batch, reqs, has_token)
        self.parts.admission.processed(reqs, has_token)
        self.parts.online_load.processed(reqs, has_token)
        self.parts.runner.processed(batch.reqs)

    def pause_generation(self, recv_req: Any) -> None:
        """Let SGLang retract the rows beside its batches with the running ones."""
        self.parts.admission.give_up()
        if recv_req.mode != "in_place":
            self.parts.view.give_back(self.parts.admission.take_launched())
        super().pause_generation(recv_req)

    # --- What SGLang asks about ----------------------------------------------------------

    def is_fully_idle(self, for_health_check: bool = False, ignore_waiting: bool = False) -> bool:
        """Count waiting offline requests as work, except for the health check, which asks
        whether a batch is about to report back.

        With ``ignore_waiting``, which SGLang has since 0.5.21, those that hold KV still count: it
        is about to flush its cache.
        """
        if ignore_waiting:
            idle = bool(super().is_fully_idle(for_health_check, ignore_waiting=True))
            return idle and not any(self.parts.view.rows_with_kv(self.running_batch))
        idle = bool(super().is_fully_idle(for_health_check))
        return idle and (for_health_check or not self.parts.admission.num_waiting())

    def get_internal_state(self, recv_req: Any) -> Any:
        """Add the state of both classes, by which it is known that this scheduler is in place."""
        if (answered := answer(recv_req.rid, self.parts.status)) is not None:
            return GetInternalStateReqOutput(internal_state=answered)
        output = super().get_internal_state(recv_req)
        output.internal_state[STATE_KEY] = self.parts.status.internal_state()
        return output
