"""Publishes co-serving state as Prometheus metrics beside SGLang's (``--enable-metrics``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_coserve.srt.kv_checkpoint.stats import COUNTED

__all__ = ["Exporter"]

_INTERVAL_S = 1.0


class Exporter:
    """Publishes a scheduler's state at most once a second; at most one exporter per process.

    ``docs/metrics.md`` documents the metrics.
    """

    def __init__(self, model_name: str, dp_rank: int | None = None) -> None:
        """``dp_rank`` is the replica's rank if there are several, as in SGLang's metrics."""
        # SGLang sets the directory for multiprocess metrics before prometheus_client is imported.
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
        self._attainment = gauge("slo_attainment", "Share of recent requests within their targets.")
        self._measured = gauge("slo_measured_seconds", "Statistic bounded by an SLO.", "slo")
        self._alone = gauge(
            "slo_alone_seconds", "The same in the no-interference baseline, predicted.", "slo"
        )
        self._error = gauge("prediction_mape", "Mean absolute error of predicted step times.")
        self._events = counter("offline_events", "Events of offline requests.", "event")
        self._shed = counter(
            "online_shed",
            "Online requests refused because they could no longer meet their target.",
        )
        self._suspended = counter("safepoint_suspended", "Steps suspended at a safepoint.", "kind")
        self._resumed = counter("safepoint_resumed", "Suspended steps that were resumed.")
        self._delay = gauge(
            "safepoint_delay_seconds",
            "Delays from an online arrival to its first token through a suspension, by stage.",
            *("step", "quantile"),
        )
        self._host_tokens = gauge(
            "kv_host_tokens", "KV tokens in host memory, by class.", "request_class"
        )
        self._recompute_tax = gauge(
            "recompute_tax", "Share of computed tokens that were recomputed.", "request_class"
        )
        self._lag_tokens = gauge("kv_checkpoint_lag_tokens", "KV tokens in flight to the host.")
        self._checkpoint_events = counter(
            "kv_checkpoint_events",
            "Events of KV checkpoints, in tokens or occurrences.",
            "event",
        )
        self._counted: dict[tuple[Any, ...], float] = {}

    def is_due(self, now_s: float) -> bool:
        """Return whether the next publication is due."""
        return now_s >= self._next_s

    def publish(self, state: Mapping[str, Any], events: Mapping[str, int], now_s: float) -> None:
        """Publish the ``/coserve/status`` of a replica, and the counts of its events so far."""
        self._next_s = now_s + _INTERVAL_S
        common = self._common
        for request_class in ("online", "offline"):
            for kind in ("waiting", "running"):
                value = state[request_class][kind]
                self._requests.labels(*common, request_class, kind).set(value)
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
        """Increase a counter to a total, which must not decrease."""
        key = (counter, *labels)
        counter.labels(*self._common, *labels).inc(total - self._counted.get(key, 0))
        self._counted[key] = total
