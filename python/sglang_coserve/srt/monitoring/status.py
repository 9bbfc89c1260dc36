"""Reports the state of a scheduler to ``/coserve/status`` and Prometheus."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sglang_coserve.core.control.bill import BillReport
from sglang_coserve.lines.background import TaskSupervisor
from sglang_coserve.srt import compat
from sglang_coserve.srt.admission.admission import OFFLINE_EVENTS, Admission
from sglang_coserve.srt.marks.request_marks import is_offline
from sglang_coserve.srt.monitoring.exporter import Exporter
from sglang_coserve.srt.monitoring.latencies import LatencyHistograms, oldest_waiting_s
from sglang_coserve.srt.monitoring.recompute_meter import RecomputeMeter
from sglang_coserve.srt.monitoring.replica_load import LoadReporter
from sglang_coserve.srt.monitoring.replica_metrics import (
    REPLICA_METRICS,
    ReplicaFigures,
    replica_values,
)
from sglang_coserve.srt.monitoring.scheduler_query import (
    ANSWER_KEY,
    BATCH_DELAYS,
    EXPECTED_RATE_KEY,
    LAST_STEPS,
    LEAVE,
    LONGEST_STEPS,
    PULSE,
    STANDING,
    STATUS,
    STEPS_OF,
    asked,
)
from sglang_coserve.srt.monitoring.step_ring import StepDocument, StepRing
from sglang_coserve.srt.steps.engine_parts import EngineParts
from sglang_coserve.srt.steps.step_record import StepRecord

if TYPE_CHECKING:
    from sglang_coserve.srt.monitoring.request_spans import RequestSpans

_INTERVAL_S: Final = 1.0
"""At which metrics and the spans of delays are published."""

_NO_STEPS: Final[StepDocument] = {"steps": [], "steps_left_out": 0}

logger = logging.getLogger(__name__)


class SchedulerStatus:
    """Collects the state of both request classes as plain values."""

    def __init__(
        self,
        parts: EngineParts,
        admission: Admission,
        load: LoadReporter,
        background: TaskSupervisor,
        num_unnoticed: Callable[[], int],
        kv_moves: Callable[[], Mapping[str, int]],
    ) -> None:
        """``num_unnoticed`` counts the requests that ended without notice; ``kv_moves`` returns
        the figures of moved KV."""
        self._num_unnoticed = num_unnoticed
        self._kv_moves = kv_moves
        self._recompute = RecomputeMeter()
        self._advisory = parts.advisory
        self._ask = partial(parts.advisory.ask, STATUS)
        scheduler = self._scheduler = parts.scheduler
        self._queues = parts.queues
        self._config = parts.config
        self._admission = admission
        self._lane = parts.lane
        self._kv_store = parts.kv_store
        self._background = background
        self._load = load
        self._events = parts.events
        self._keeps_conversations = parts.keeps_conversations
        self._promise = parts.config.objective().sentence(
            keeps_conversations=parts.keeps_conversations
        )
        self._requests = parts.requests
        args = compat.settings_of(scheduler.server_args)
        dp_rank = compat.parallel(scheduler).dp_rank
        self._next_s = 0.0
        self._exporter: Exporter | None = None
        self._latencies: LatencyHistograms | None = None
        self._spans: RequestSpans | None = None
        self._steps: StepRing | None = None
        """The last steps, on rank 0; None on other ranks, which have the same steps."""

        if not compat.is_first_rank(scheduler):
            return
        if not dp_rank:
            logger.info("the promise to online requests: %s", self._promise)
        if args.enable_trace:
            # Imports OpenTelemetry, as SGLang has by now.
            from sglang_coserve.srt.monitoring.request_spans import RequestSpans

            self._spans = RequestSpans(parts.requests)
        if args.enable_metrics:
            labels = {"model_name": args.served_model_name}
            if dp_rank is not None:  # As in SGLang's own metrics.
                labels["dp_rank"] = str(dp_rank)
            self._exporter = Exporter(REPLICA_METRICS, labels)
            self._latencies = LatencyHistograms()
        self._steps = StepRing()

    def internal_state(self) -> dict[str, Any]:
        """Return the state of this replica for ``/coserve/status``."""
        return {
            "config": self._config.to_dict(),
            EXPECTED_RATE_KEY: self._load.rate_alone_per_s(),
            **self.state(),
        }

    def state(self) -> dict[str, Any]:
        """Return the current state of both classes; who holds KV may be a second old."""
        scheduler, now_s = self._scheduler, time.perf_counter()
        running = self._queues.running_requests()
        num_offline = sum(is_offline(req) for req in running)
        prefilling = scheduler.chunked_req
        return {
            "promise": self._promise,
            "slo": self._admission.core.interference.monitor.report(now_s).to_dict(),
            "cache": self._cache(now_s),
            "online": {
                "waiting": len(scheduler.waiting_queue),
                "running": len(running) - num_offline,
                "shed": self._events["shed"],
                **self._delays(),
            },
            "offline": {
                "waiting": self._admission.num_waiting(),
                "running": num_offline + self._lane.num_running,
                "prefilling": int(prefilling is not None and is_offline(prefilling)),
                "stopped_by": self._admission.stopped_by,
                **{event: self._events[event] for event in OFFLINE_EVENTS},
            },
            "unnoticed_ends": self._num_unnoticed(),
            "kv_tokens": self._load.recent().kv._asdict(),
            "recompute": self._recompute.state(),
            "kv_checkpoint": self._kv_store.figures(),
            "kv_moves": self._kv_moves(),
            "background": self._background.state(),
            **self._admission.state(),
            **self._lane.safepoints.state(),
        }

    def answer(
        self, rid: str | None, let_leave: Callable[[Sequence[str], str], list[str]]
    ) -> dict[str, Any] | None:
        """Return the internal state that answers a request named so; None if it is none of ours.

        ``let_leave`` lets requests leave with the KV of a model, and returns those that do.
        """
        if (asked_for := asked(rid)) is None:
            return None
        question, arguments = asked_for
        answers: dict[str, Callable[..., Any]] = {
            PULSE: lambda: self._admission.stopped_by,
            STANDING: lambda: self._ask(self.state, {}),
            BATCH_DELAYS: lambda: self._ask(self.batch_delays_s, None),
            LAST_STEPS: lambda *span_s: self._ask(lambda: self.last_steps(*span_s), []),
            LONGEST_STEPS: lambda seconds, limit: self._ask(
                lambda: self.longest_steps(seconds, limit), _NO_STEPS
            ),
            STEPS_OF: lambda rid: self._ask(lambda: self.steps_of(rid), None),
            LEAVE: let_leave,
        }
        return {ANSWER_KEY: answers[question](*arguments)}

    def batch_delays_s(self) -> dict[str, float] | None:
        """Return by how much each batch has delayed online requests; None if that is not known."""
        bill = self._bill()
        return None if bill is None else dict(bill.jobs)

    def last_steps(self, from_s: float, until_s: float) -> list[StepDocument]:
        """Return the kept steps that ended from ``from_s`` to ``until_s`` seconds ago."""
        now_s = time.perf_counter()
        if self._steps is None:
            return []
        return self._steps.between(now_s - from_s, now_s - until_s, self._suspended(now_s))

    def longest_steps(self, seconds: float, limit: int) -> StepDocument:
        """Return the longest steps of the last ``seconds``, as far as they are kept."""
        now_s = time.perf_counter()
        if self._steps is None:
            return _NO_STEPS
        return self._steps.longest_since(now_s - seconds, limit, self._suspended(now_s))

    def steps_of(self, rid: str) -> StepDocument | None:
        """Return the kept steps of a request; None if it is in none."""
        if self._steps is None:
            return None
        return self._steps.of_request(rid, self._suspended(time.perf_counter()))

    def _suspended(self, now_s: float) -> StepRecord | None:
        """Return the record of the suspended step so far; None if no step is suspended."""
        suspended = self._lane.suspended
        return None if suspended is None else suspended.tracked.suspended_record(now_s)

    def switched_off(self, part: str) -> None:
        """Publish that a part has failed and is off; at once, for it may be this one."""
        if self._exporter is not None:
            self._exporter.publish({"advisory_off": {part: 1}})

    def observers(self) -> Iterator[tuple[str, Callable[[StepRecord], None]]]:
        """Yield what takes in each step, with its name among the advisory parts."""
        if self._steps is not None:
            yield "steps", self._steps.add
            yield "recompute", self._recompute.ended
            yield "safepoint delays", self._first_tokens
        if self._latencies is not None:
            yield "latencies", self._latencies.ended

    def _first_tokens(self, record: StepRecord) -> None:
        delays = self._lane.safepoints.stats
        for request in record.first:
            delays.first_token(request.info.rid, record.ended_s)

    def trace(self, record: StepRecord) -> None:
        """Write the spans of a step, while its requests are live."""
        if self._spans is not None:
            self._spans.ended(record)

    def publish_if_due(self) -> None:
        """Publish metrics and spans, if enabled, at most once a second; log warnings."""
        if self._steps is None:
            return
        now_s = time.perf_counter()
        if now_s >= self._next_s:
            self._next_s = now_s + _INTERVAL_S
            self._publish(now_s)
        for warning in self._admission.warnings(now_s):
            logger.warning("%s", warning)

    def _publish(self, now_s: float) -> None:
        bill, latencies = self._admission.core.interference.bill, self._latencies
        delays = [] if bill is None else bill.take_delays()
        if self._spans is not None:
            self._spans.billed(delays)
        if self._exporter is None or latencies is None:
            return
        latencies.billed(delays)
        figures = ReplicaFigures(
            state=self.state(),
            load=self._load.recent().load,
            latencies=latencies,
            oldest_waiting_s=oldest_waiting_s(self._requests, now_s),
            budget_s=self._admission.budget_s,
            off=dict.fromkeys(self._advisory.off, 1),
        )
        self._exporter.publish(replica_values(figures))

    def _bill(self) -> BillReport | None:
        bill = self._admission.core.interference.bill
        return None if bill is None else bill.report()

    def _cache(self, now_s: float) -> dict[str, float | int | None]:
        """Return the prompt tokens of online requests that were cached, since the start, and the
        tokens that the cache keeps now; None where unknown."""
        core = self._admission.core
        kv, found = core.interference.kv, core.interference.cache
        return {
            "online_prompt_tokens": None if kv is None else found.prompt_tokens,
            "found": None if kv is None else found.found_tokens,
            "found_alone": None if kv is None else found.found_alone_tokens,
            "protected_tokens": core.protection(now_s).tokens,
            "lease_s": core.online_lease_s(now_s) if self._keeps_conversations else None,
        }

    def _delays(self) -> dict[str, float | int | None]:
        """Return by how much offline work has delayed online requests since the start."""
        bill = self._bill()
        return {
            "delay_s": None if bill is None else bill.total_s,
            "delay_ttft_s": None if bill is None else bill.ttft_s,
            "delay_gaps_s": None if bill is None else bill.gaps_s,
            "billed": 0 if bill is None else bill.requests,
        }
