"""Reports the state of a scheduler to ``/coserve/status`` and Prometheus."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.offline_rate import expected_tokens_per_s
from sglang_coserve.srt import compat
from sglang_coserve.srt.admission.protocol import Admission
from sglang_coserve.srt.engine_view import EngineView
from sglang_coserve.srt.exporter import Exporter
from sglang_coserve.srt.kv_checkpoint.hooks import KvCheckpointing
from sglang_coserve.srt.replicas import EXPECTED_RATE_KEY
from sglang_coserve.srt.request_marks import is_offline
from sglang_coserve.srt.step_runner import StepRunner

__all__ = ["SchedulerStatus"]

logger = logging.getLogger(__name__)


class SchedulerStatus:
    """Collects the state of both request classes as plain values."""

    def __init__(
        self,
        scheduler: Any,
        config: CoserveConfig,
        *,
        admission: Admission,
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
        wants_metrics = args.enable_metrics and self._is_rank_0
        dp_rank = compat.parallel(scheduler).dp_rank
        self._exporter = Exporter(args.served_model_name, dp_rank) if wants_metrics else None

    def internal_state(self) -> dict[str, Any]:
        """Return the state of this replica for ``/coserve/status``."""
        return {
            "config": self._config.to_dict(),
            EXPECTED_RATE_KEY: self._expected_offline_rate(),
            **self.state(),
        }

    def state(self) -> dict[str, Any]:
        """Return the current state of both classes."""
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

    def publish(self) -> None:
        """Publish Prometheus metrics, if enabled and due; log a warning about missed targets."""
        if not self._is_rank_0:
            return  # All ranks have the same state.
        now_s = time.perf_counter()
        if self._exporter is not None and self._exporter.is_due(now_s):
            self._exporter.publish(self.state(), self._counted_events(), now_s)
        warning = self._admission.interference.monitor.warning(now_s)
        if warning is not None:
            logger.warning("%s", warning)

    def _counted_events(self) -> dict[str, int]:
        return {name: self._events[name] for name in self._admission.event_names}

    def _expected_offline_rate(self) -> float | None:
        """Return the predicted offline tokens/s of an idle engine; None if unknown."""
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
