"""The state of both classes as Prometheus metrics, beside SGLang's own (``--enable-metrics``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_coserve.core.engine_load import ReplicaLoad
from sglang_coserve.srt.kv_checkpoint.stats import COUNTED

__all__ = ["Exporter"]

_INTERVAL_S = 1.0


class Exporter:
    """Publishes a scheduler's state, at most once a second; one exporter a process.

    The names and meanings are listed in ``docs/metrics.md``.
    """

    def __init__(self, model_name: str, dp_rank: int | None = None) -> None:
        """``dp_rank`` is that of one replica of several, as in SGLang's own metrics."""
        # SGLang sets where the processes of a server leave their metrics before the first import.
        from prometheus_client import Counter, Gauge

        common = {"model_name": model_name}
        if dp_rank is not None:
            common["dp_rank"] = str(dp_rank)

        def gauge(name: str, text: str, *labels: str) -> Any:
            names = (*common, *labels)
            return Gauge(f"coserve_{name}", text, names, multiprocess_mode="mostrecent")

        def counter(name: str, text: str, *labels: str) -> Any:
            return Counter(f"coserve_{name}", text, (*common, *labels))

        self._common = tuple(common.values())
        self._next_s = 0.0
        self._requests = gauge("requests", "Requests by class and state.", "request_class", "state")
        self._outstanding = gauge(
            "outstanding_tokens", "Tokens yet to be computed, by class.", "request_class"
        )
        self._kv_tokens = gauge(
            "kv_tokens", "Device KV by what becomes of it: online, reclaimable or free.", "state"
        )
        self._reclaim = gauge(
            "reclaim_seconds", "Predicted time until reclaimable KV is an online request's."
        )
        self._headroom = gauge(
            "headroom_tokens_per_second", "What offline work would get now, predicted."
        )
        self._max_lines = gauge("max_lines", "Offline requests that fit in at a time.")
        self._attainment = gauge("slo_attainment", "Share of late requests within their targets.")
        self._measured = gauge("slo_measured_seconds", "Statistic that an SLO bounds.", "slo")
        self._alone = gauge(
            "slo_alone_seconds", "The same in the no-interference baseline, predicted.", "slo"
        )
        self._error = gauge("prediction_mape", "Mean absolute error of predicted iterations.")
        self._events = counter("offline_events", "What became of offline requests.", "event")
        self._shed = counter(
            "online_shed",
            "Online requests refused since they could not meet their target any more.",
        )
        self._suspended = counter("safepoint_suspended", "Steps suspended at a safepoint.", "kind")
        self._resumed = counter("safepoint_resumed", "Suspended steps that went on.")
        self._delay = gauge(
            "safepoint_delay_seconds",
            "The way from an online arrival to its first token through a suspension, step by step.",
            *("step", "quantile"),
        )
        self._host_tokens = gauge(
            "kv_host_tokens", "KV tokens in host memory, by class.", "request_class"
        )
        self._recompute_tax = gauge(
            "recompute_tax", "Share of the computed tokens computed before.", "request_class"
        )
        self._lag_tokens = gauge("kv_checkpoint_lag_tokens", "KV tokens being copied to the host.")
        self._checkpoint_events = counter(
            "kv_checkpoint_events",
            "What became of the KV of offline requests, in tokens or in cases.",
            "event",
        )
        self._counted: dict[tuple[Any, ...], float] = {}

    def is_due(self, now_s: float) -> bool:
        """Tell whether to publish now."""
        return now_s >= self._next_s

    def publish(
        self,
        state: Mapping[str, Any],
        events: Mapping[str, int],
        load: ReplicaLoad,
        now_s: float,
    ) -> None:
        """Publish what ``/coserve/status`` says of a replica, its events so far, and its load."""
        self._next_s = now_s + _INTERVAL_S
        common = self._common
        for request_class in ("online", "offline"):
            for kind in ("waiting", "running"):
                value = state[request_class][kind]
                self._requests.labels(*common, request_class, kind).set(value)
        self._publish_load(load)
        self._count(self._shed, state["online"]["shed"])
        for event, count in events.items():
            self._count(self._events, count, event)
        slo = state["slo"]
        if slo["attainment"] is not None:
            self._attainment.labels(*common).set(slo["attainment"])
        for standing in slo["measured"]:
            for metric, key in (
                (self._measured, "measured_ms"),
                (self._alone, "online_alone_ms"),
            ):
                if standing[key] is not None:
                    metric.labels(*common, standing["slo"]).set(standing[key] / 1e3)
        prediction = state.get("prediction")
        if prediction is not None and prediction["mape"] is not None:
            self._error.labels(*common).set(prediction["mape"])
        checkpoints = state.get("kv_checkpoint")
        if checkpoints is not None:
            self._publish_checkpoints(checkpoints)
        safepoints = state.get("safepoints")
        if safepoints is not None and safepoints["enabled"]:
            self._publish_safepoints(safepoints)

    def _publish_load(self, load: ReplicaLoad) -> None:
        common = self._common
        for request_class, requests in (("online", load.online), ("offline", load.offline)):
            labels = (*common, request_class)
            self._outstanding.labels(*labels).set(requests.outstanding_tokens)
        taken = {"online": load.online_kv_tokens, "reclaimable": load.reclaimable_kv_tokens}
        free = load.kv_tokens - sum(taken.values())
        for state, tokens in (*taken.items(), ("free", free)):
            self._kv_tokens.labels(*common, state).set(tokens)
        if load.reclaim_s is not None:
            self._reclaim.labels(*common).set(load.reclaim_s)
        if load.headroom_tokens_per_s is not None:
            self._headroom.labels(*common).set(load.headroom_tokens_per_s)
        self._max_lines.labels(*common).set(load.max_lines)

    def _publish_checkpoints(self, checkpoints: Mapping[str, Any]) -> None:
        for request_class, values in checkpoints["classes"].items():
            labels = (*self._common, request_class)
            self._host_tokens.labels(*labels).set(values["host_tokens"])
            self._recompute_tax.labels(*labels).set(values["recompute_tax"])
        self._lag_tokens.labels(*self._common).set(checkpoints["lag_tokens"])
        for event in COUNTED:
            self._count(self._checkpoint_events, checkpoints[event], event)

    def _publish_safepoints(self, safepoints: Mapping[str, Any]) -> None:
        for kind, count in safepoints["suspended"].items():
            self._count(self._suspended, count, kind)
        self._count(self._resumed, safepoints["resumed"])
        for step, delays_ms in safepoints["delays_ms"].items():
            for quantile in ("p50", "p99"):
                if delays_ms[quantile] is not None:
                    gauge = self._delay.labels(*self._common, step, f"0.{quantile[1:]}")
                    gauge.set(delays_ms[quantile] / 1e3)

    def _count(self, counter: Any, total: float, *labels: str) -> None:
        """Bring a counter to a total that never shrinks."""
        key = (counter, *labels)
        counter.labels(*self._common, *labels).inc(total - self._counted.get(key, 0))
        self._counted[key] = total
