"""What a scheduler tells of itself, to ``/coserve/status`` and to Prometheus."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.bill import BillReport
from sglang_coserve.core.offline_rate import expected_tokens_per_s
from sglang_coserve.srt import compat
from sglang_coserve.srt.admission.protocol import Admission
from sglang_coserve.srt.busy_share import BusyShare
from sglang_coserve.srt.engine_view import EngineView
from sglang_coserve.srt.exporter import Exporter
from sglang_coserve.srt.kv_checkpoint.hooks import KvCheckpointing
from sglang_coserve.srt.latencies import Latencies
from sglang_coserve.srt.replicas import BATCH_DELAYS_KEY, EXPECTED_RATE_KEY, TRACE_KEY
from sglang_coserve.srt.request_ledger import RequestLedger
from sglang_coserve.srt.request_marks import is_offline
from sglang_coserve.srt.safepoint.batch_kind import kind_of
from sglang_coserve.srt.step_runner import StepRunner
from sglang_coserve.srt.step_trace import StepTrace

__all__ = ["SchedulerStatus"]

_EXPECTED_INTERVAL_S: Final = 60.0
"""It changes slowly, and under ``fifo`` its model is read from the disk."""

logger = logging.getLogger(__name__)


class SchedulerStatus:
    """Gathers the state of both classes, in plain values."""

    def __init__(
        self,
        scheduler: Any,
        config: CoserveConfig,
        *,
        admission: Admission,
        ledger: RequestLedger,
        view: EngineView,
        runner: StepRunner,
        checkpointing: KvCheckpointing,
        events: Counter[str],
    ) -> None:
        self._scheduler = scheduler
        self._view = view
        self._config = config
        self._admission = admission
        self._runner = runner
        self._checkpointing = checkpointing
        self._events = events
        args = compat.settings_of(scheduler.server_args)
        self._is_rank_0 = compat.is_first_rank(scheduler)
        dp_rank = compat.parallel(scheduler).dp_rank
        self._exporter: Exporter | None = None
        self._latencies: Latencies | None = None
        self._trace = StepTrace(ledger, process=1 + (dp_rank or 0)) if self._is_rank_0 else None
        self.wanted_trace_s: float | None = None
        """How much of the past the next state is to have; None: none of it."""

        self._expected_per_s: float | None = None
        self._next_expected_s = 0.0
        self._busy = BusyShare(time.perf_counter())
        if args.enable_metrics and self._is_rank_0:
            self._exporter = Exporter(args.served_model_name, dp_rank)
            self._latencies = Latencies(ledger)

    def internal_state(self) -> dict[str, Any]:
        """Return what ``/coserve/status`` shows."""
        return {
            "config": self._config.to_dict(),
            EXPECTED_RATE_KEY: self._expected_offline_rate(),
            TRACE_KEY: self._take_trace(),
            BATCH_DELAYS_KEY: None if (bill := self._bill()) is None else bill.jobs,
            **self.state(),
        }

    def state(self) -> dict[str, Any]:
        """Return how both classes stand now."""
        scheduler = self._scheduler
        running = self._view.running_rows()
        num_offline = sum(is_offline(req) for req in running)
        prefilling = scheduler.chunked_req
        return {
            "slo": self._admission.interference.monitor.report(time.perf_counter()).to_dict(),
            "online": {
                "waiting": len(scheduler.waiting_queue),
                "running": len(running) - num_offline,
                "shed": self._events["shed"],
                **self._delays(),
            },
            "offline": {
                "waiting": self._admission.num_waiting(),
                "running": num_offline + self._admission.num_running(),
                "prefilling": int(prefilling is not None and is_offline(prefilling)),
                **self._counted_events(),
            },
            "kv_checkpoint": self._checkpointing.stats().to_dict(),
            **self._admission.state(),
            **self._runner.state(),
        }

    def launched(self, batch: Any) -> None:
        """Note the batch with which a pass ends; None if nothing is to run."""
        if self._trace is None:
            return
        now_s = time.perf_counter()
        self._trace.launched(batch, now_s, self._runner.lane)
        if self._latencies is not None:
            self._busy.passes(now_s, is_busy=bool(batch))
            self._latencies.launched(batch, now_s)

    def stopped(self, batch: Any) -> None:
        """Note that the batch that was launched first has been suspended."""
        lane = self._runner.lane
        if self._trace is not None and lane is not None and lane.suspended is not None:
            self._trace.ended(
                batch.reqs, kind_of(batch), time.perf_counter(), stopped_at=lane.suspended.layer
            )

    def processed(self, batch: Any, reqs: Sequence[Any], has_token: Sequence[bool]) -> None:
        """Note the results of a batch, whose rows were ``reqs``, and publish."""
        if self._trace is not None:
            now_s = time.perf_counter()
            self._trace.ended(reqs, kind_of(batch), now_s, has_token)
            if self._latencies is not None:
                self._latencies.processed(reqs, has_token, now_s)
        self.publish()

    def forget(self, rid: str) -> None:
        """Drop what is kept of a request that has ended."""
        if self._trace is not None:
            self._trace.forget(rid, time.perf_counter())
        if self._latencies is not None:
            self._latencies.forget(rid)

    def publish(self) -> None:
        """Renew the Prometheus metrics, where they are wanted and due; warn of missed targets."""
        if not self._is_rank_0:
            return  # All ranks see the same.
        now_s = time.perf_counter()
        if self._exporter is not None and self._exporter.is_due(now_s):
            self._publish(self._exporter, now_s)
        warning = self._admission.interference.monitor.warning(now_s)
        if warning is not None:
            logger.warning("%s", warning)

    def _take_trace(self) -> list[str] | None:
        """Return the last steps, if somebody has asked for them."""
        seconds, self.wanted_trace_s = self.wanted_trace_s, None
        if seconds is None or self._trace is None:
            return None
        return self._trace.since(time.perf_counter() - seconds)

    def _publish(self, exporter: Exporter, now_s: float) -> None:
        assert self._latencies is not None
        exporter.publish(self.state(), self._counted_events(), now_s)
        exporter.publish_latencies(self._latencies)
        if (bill := self._admission.interference.bill) is not None:
            exporter.publish_delays(bill.take_delays())
        if now_s >= self._next_expected_s:
            self._next_expected_s = now_s + _EXPECTED_INTERVAL_S
            self._expected_per_s = self._expected_offline_rate()
        expected_per_s = self._expected_per_s
        exporter.publish_load(
            outstanding_tokens=self._latencies.outstanding_tokens(),
            oldest_waiting_s=self._latencies.oldest_waiting_s(now_s),
            headroom_per_s=(
                None if expected_per_s is None else (1 - self._busy.share(now_s)) * expected_per_s
            ),
            budget_s=self._admission.budget_s,
        )

    def _bill(self) -> BillReport | None:
        bill = self._admission.interference.bill
        return None if bill is None else bill.report()

    def _delays(self) -> dict[str, float | int | None]:
        """Return by how much offline work has delayed online requests since the start."""
        bill = self._bill()
        return {
            "delay_s": None if bill is None else bill.total_s,
            "delay_ttft_s": None if bill is None else bill.ttft_s,
            "delay_gaps_s": None if bill is None else bill.gaps_s,
            "billed": 0 if bill is None else bill.requests,
        }

    def _counted_events(self) -> dict[str, int]:
        return {name: self._events[name] for name in self._admission.event_names}

    def _expected_offline_rate(self) -> float | None:
        """Return the tokens a second that offline requests would get now; None if unknown."""
        model = self._admission.latency_model()
        if model is None:
            return None
        scheduler = self._scheduler
        limit = self._config.offline_max_running or scheduler.max_running_requests
        return expected_tokens_per_s(
            model,
            kv_tokens=scheduler.max_total_num_tokens,
            max_rows=min(limit, scheduler.max_running_requests),
            chunk_tokens=scheduler.chunked_prefill_size or scheduler.max_prefill_tokens,
        )
