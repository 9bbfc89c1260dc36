"""What a scheduler tells of itself, to ``/coserve/status`` and to Prometheus."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.bill import BillReport
from sglang_coserve.srt import compat
from sglang_coserve.srt.admission.protocol import Admission
from sglang_coserve.srt.engine_view import EngineView
from sglang_coserve.srt.exporter import Exporter
from sglang_coserve.srt.kv_checkpoint.hooks import KvCheckpointing
from sglang_coserve.srt.kv_pools import KvPools
from sglang_coserve.srt.replica_load import LoadReporter
from sglang_coserve.srt.replicas import BATCH_DELAYS_KEY, EXPECTED_RATE_KEY
from sglang_coserve.srt.request_ledger import RequestLedger
from sglang_coserve.srt.request_marks import is_offline
from sglang_coserve.srt.step_runner import StepRunner

__all__ = ["SchedulerStatus"]

logger = logging.getLogger(__name__)


class SchedulerStatus:
    """Gathers the state of both classes, in plain values."""

    def __init__(
        self,
        scheduler: Any,
        config: CoserveConfig,
        *,
        admission: Admission,
        view: EngineView,
        pools: KvPools,
        ledger: RequestLedger,
        runner: StepRunner,
        checkpointing: KvCheckpointing,
        load: LoadReporter,
        events: Counter[str],
    ) -> None:
        self._scheduler = scheduler
        self._view = view
        self._pools = pools
        self._ledger = ledger
        self._config = config
        self._admission = admission
        self._runner = runner
        self._checkpointing = checkpointing
        self._load = load
        self._events = events
        args = compat.settings_of(scheduler.server_args)
        self._is_rank_0 = compat.is_first_rank(scheduler)
        wants_metrics = args.enable_metrics and self._is_rank_0
        dp_rank = compat.parallel(scheduler).dp_rank
        self._exporter = Exporter(args.served_model_name, dp_rank) if wants_metrics else None

    def internal_state(self) -> dict[str, Any]:
        """Return what ``/coserve/status`` shows."""
        return {
            "config": self._config.to_dict(),
            EXPECTED_RATE_KEY: self._load.rate_alone(),
            BATCH_DELAYS_KEY: None if (bill := self._bill()) is None else bill.jobs,
            **self.state(),
        }

    def state(self) -> dict[str, Any]:
        """Return how both classes stand now."""
        scheduler = self._scheduler
        running = self._view.running_rows()
        num_offline = sum(is_offline(req) for req in running)
        prefilling = scheduler.chunked_req
        online, offline = self._ledger.with_kv()
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
            "kv_tokens": self._pools.by_class(online, offline)._asdict(),
            "kv_checkpoint": self._checkpointing.stats().to_dict(),
            **self._admission.state(),
            **self._runner.state(),
        }

    def publish(self) -> None:
        """Renew the Prometheus metrics, where they are wanted and due; warn of missed targets."""
        if not self._is_rank_0:
            return  # All ranks see the same.
        now_s = time.perf_counter()
        if self._exporter is not None and self._exporter.is_due(now_s):
            state, events = self.state(), self._counted_events()
            self._exporter.publish(state, events, self._load.load(), now_s)
        warning = self._admission.interference.monitor.warning(now_s)
        if warning is not None:
            logger.warning("%s", warning)

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
