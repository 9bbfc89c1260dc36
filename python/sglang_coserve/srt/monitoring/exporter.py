"""Publishes co-serving state as Prometheus metrics beside SGLang's (``--enable-metrics``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglang_coserve.core.control.bill import Delay
from sglang_coserve.core.engine_load import ReplicaLoad
from sglang_coserve.srt.kv_checkpoint.hooks import COUNTED
from sglang_coserve.srt.monitoring.latencies import (
    DELAY_BUCKETS_S,
    GAP_BUCKETS_S,
    WAIT_BUCKETS_S,
    Buckets,
    LatencyHistograms,
)

_INTERVAL_S = 1.0


class Exporter:
    """Publishes a scheduler's state at most once a second; at most one exporter per process.

    ``docs/prometheus.md`` is made from the texts of the metrics.
    """

    def __init__(self, model_name: str, dp_rank: int | None = None) -> None:
        """``dp_rank`` is that of one replica of several, as in SGLang's own metrics."""
        # SGLang sets where the processes of a server leave their metrics before the first import.
        from prometheus_client import Counter, Gauge, Histogram

        common = {"model_name": model_name}
        if dp_rank is not None:
            common["dp_rank"] = str(dp_rank)

        def gauge(name: str, text: str, *labels: str) -> Any:
            names = (*common, *labels)
            return Gauge(f"coserve_{name}", text, names, multiprocess_mode="mostrecent")

        def counter(name: str, text: str, *labels: str) -> Any:
            return Counter(f"coserve_{name}", text, (*common, *labels))

        def histogram(name: str, text: str, label: str, bounds_s: Sequence[float]) -> Any:
            return Histogram(f"coserve_{name}", text, (*common, label), buckets=bounds_s)

        self._common = tuple(common.values())
        self._next_s = 0.0
        by_class = "request_class"
        self._requests = gauge(
            "requests", "Requests now: state is waiting or running.", by_class, "state"
        )
        self._outstanding = gauge(
            "online_outstanding_tokens",
            "Tokens of online requests yet to be computed, as in /coserve/load.",
        )
        self._kv_tokens = gauge(
            "kv_tokens",
            "KV on the device: held by online requests, reclaimable for them, or free.",
            "state",
        )
        self._reclaim = gauge(
            "reclaim_seconds",
            "Predicted time until online requests can take reclaimable KV; not with fifo.",
        )
        self._headroom = gauge(
            "headroom_tokens_per_second",
            "What offline work would get now, as in /coserve/load; not with fifo.",
        )
        self._max_lines = gauge(
            "max_lines", "Offline requests that fit beside online ones, as in /coserve/load."
        )
        self._attainment = gauge(
            "slo_attainment", "Share of recent online requests that met their targets."
        )
        self._measured = gauge("slo_measured_seconds", "The statistic that an SLO bounds.", "slo")
        self._alone = gauge(
            "slo_alone_seconds", "The same in the no-interference baseline, predicted.", "slo"
        )
        self._error = gauge(
            "prediction_mape", "Mean absolute error of predicted step times, a fraction."
        )
        self._bias = gauge(
            "prediction_bias",
            "Mean error of predicted step times, a fraction; above 0: they were too long.",
        )
        self._events = counter(
            "offline_events",
            "Offline requests received, admitted, parked, paused, resumed, retracted, put_back, "
            "aborted_waiting; suspended steps dropped.",
            "event",
        )
        self._shed = counter("online_shed", "Online requests refused under --overload shed.")
        self._failed_plans = counter(
            "plans_failed", "Plans that failed; SGLang's own pass served those steps."
        )
        self._off = gauge("advisory_off", "1 for each part that failed and is off.", "part")
        self._unnoticed = counter(
            "unnoticed_ends", "Requests that left the engine unnoticed: 0, or a fault to report."
        )
        self._suspended = counter(
            "safepoint_suspended", "Steps suspended; kind is extend, decode or mixed.", "kind"
        )
        self._resumed = counter("safepoint_resumed", "Suspended steps that were resumed.")
        self._delay = gauge(
            "safepoint_delay_seconds",
            "From an online arrival to its first token through a suspension, step by step: "
            "statistic is p50 or p99.",
            *("step", "statistic"),
        )
        self._host_tokens = gauge("kv_host_tokens", "KV tokens in host memory now.")
        self._recompute_tax = gauge(
            "recompute_tax",
            "Share of the computed tokens that had been computed before.",
            by_class,
        )
        self._lag_tokens = gauge(
            "kv_checkpoint_lag_tokens", "KV tokens being copied to the host now."
        )
        self._checkpoint_events = counter(
            "kv_checkpoint_events",
            "Events of the KV of offline requests, in tokens or occurrences, named as in "
            "/coserve/status.",
            "event",
        )
        self._ttft = histogram(
            "ttft_seconds",
            "Time to first token, from the arrival at the HTTP server.",
            by_class,
            WAIT_BUCKETS_S,
        )
        self._itl = histogram(
            "itl_seconds", "Gaps between tokens, in the scheduler.", by_class, GAP_BUCKETS_S
        )
        self._queued = histogram(
            "queue_seconds",
            "From the arrival at the HTTP server to a request's first step.",
            by_class,
            WAIT_BUCKETS_S,
        )
        self._delays = histogram(
            "interference_seconds",
            "The bill: how much later than alone an online request had its first token, and its "
            "last.",
            "token",
            DELAY_BUCKETS_S,
        )
        self._prompt_tokens = counter(
            "prompt_tokens",
            "Prompt tokens of requests that ran: source is cached or computed.",
            by_class,
            "source",
        )
        self._oldest = gauge(
            "oldest_waiting_seconds",
            "Age of the oldest waiting request, of those that have never run.",
            by_class,
        )
        self._budget = gauge(
            "budget_seconds",
            "Latency budget of offline work in the last plan that had one; +Inf before that.",
        )
        self._background = _background_counter(tuple(common))
        self._counted: dict[tuple[Any, ...], float] = {}

    def is_due(self, now_s: float) -> bool:
        """Return whether the next publication is due."""
        return now_s >= self._next_s

    def publish(
        self,
        state: Mapping[str, Any],
        events: Mapping[str, int],
        now_s: float,
    ) -> None:
        """Publish what ``/coserve/status`` says of a replica, and its events so far."""
        self._next_s = now_s + _INTERVAL_S
        for request_class in ("online", "offline"):
            for kind in ("waiting", "running"):
                self._set(self._requests, state[request_class][kind], request_class, kind)
        self._count(self._shed, state["online"]["shed"])
        self._count(self._unnoticed, state["unnoticed_ends"])
        for event, count in events.items():
            self._count(self._events, count, event)
        for task, background in state["background"].items():
            self._count(self._background, background["failures"], task)
        self._count(self._failed_plans, state.get("plans_failed", 0))
        slo = state["slo"]
        self._set(self._attainment, slo["attainment"])
        for standing in slo["measured"]:
            self._set(self._measured, _seconds(standing["measured_ms"]), standing["slo"])
            self._set(self._alone, _seconds(standing["online_alone_ms"]), standing["slo"])
        prediction = state.get("prediction")
        if prediction is not None:
            self._set(self._error, prediction["mape"])
            self._set(self._bias, prediction["bias"])
        self._publish_checkpoints(state["kv_checkpoint"])
        safepoints = state.get("safepoints")
        if safepoints is not None and safepoints["enabled"]:
            self._publish_safepoints(safepoints)

    def publish_latencies(self, latencies: LatencyHistograms) -> None:
        """Publish what was gathered since the last time."""
        for metric, by_class in (
            (self._ttft, latencies.ttft),
            (self._itl, latencies.gaps),
            (self._queued, latencies.queued),
        ):
            for request_class, buckets in by_class.items():
                _add(metric.labels(*self._common, request_class), buckets)
        for request_class, total in latencies.prompt_tokens.items():
            cached = latencies.cached_tokens[request_class]
            self._count(self._prompt_tokens, cached, request_class, "cached")
            self._count(self._prompt_tokens, total - cached, request_class, "computed")

    def publish_delays(self, delays: Iterable[Delay]) -> None:
        """Publish what was billed since the last time; early tokens are not delayed."""
        first, last = Buckets(DELAY_BUCKETS_S), Buckets(DELAY_BUCKETS_S)
        for delay in delays:
            first.add(max(0.0, delay.ttft_s))
            last.add(max(0.0, delay.total_s))
        _add(self._delays.labels(*self._common, "first"), first)
        _add(self._delays.labels(*self._common, "last"), last)

    def publish_load(
        self,
        load: ReplicaLoad,
        *,
        oldest_waiting_s: Mapping[str, float],
        budget_s: float | None,
    ) -> None:
        """Publish what is asked of the engine, and what it could do beside that."""
        self._set(self._outstanding, load.online.outstanding_tokens)
        taken = {"online": load.online_kv_tokens, "reclaimable": load.reclaimable_kv_tokens}
        free = load.kv_tokens - sum(taken.values())
        for state, tokens in (*taken.items(), ("free", free)):
            self._set(self._kv_tokens, tokens, state)
        self._set(self._reclaim, load.reclaim_s)
        self._set(self._headroom, load.headroom_tokens_per_s)
        self._set(self._max_lines, load.max_lines)
        for request_class, waited_s in oldest_waiting_s.items():
            self._set(self._oldest, waited_s, request_class)
        self._set(self._budget, budget_s)

    def _publish_checkpoints(self, checkpoints: Mapping[str, Any]) -> None:
        for request_class, values in checkpoints["classes"].items():
            self._set(self._recompute_tax, values["recompute_tax"], request_class)
        self._set(self._host_tokens, checkpoints["host_tokens"])
        self._set(self._lag_tokens, checkpoints["lag_tokens"])
        for event in COUNTED:
            self._count(self._checkpoint_events, checkpoints[event], event)

    def _publish_safepoints(self, safepoints: Mapping[str, Any]) -> None:
        for kind, count in safepoints["suspended"].items():
            self._count(self._suspended, count, kind)
        self._count(self._resumed, safepoints["resumed"])
        for step, delays_ms in safepoints["delays_ms"].items():
            for statistic in ("p50", "p99"):
                self._set(self._delay, _seconds(delays_ms[statistic]), step, statistic)

    def switched_off(self, part: str) -> None:
        """Publish that a part has failed and is off."""
        self._set(self._off, 1, part)

    def _set(self, gauge: Any, value: float | None, *labels: str) -> None:
        """Set a gauge; one whose value is not known stays as it is."""
        if value is not None:
            gauge.labels(*self._common, *labels).set(value)

    def _count(self, counter: Any, total: float, *labels: str) -> None:
        """Increase a counter to a total, which must not decrease."""
        key = (counter, *labels)
        counter.labels(*self._common, *labels).inc(total - self._counted.get(key, 0))
        self._counted[key] = total


class BackgroundFailures:
    """Counts the failures of a process that has no ``Exporter``; see ``TaskSupervisor``."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._counter: Any = None

    def __call__(self, task: str, failures: int) -> None:
        """Count ``failures`` of the tasks of one name."""
        # When SGLang's settings are read it has not said yet where metrics go.
        if self._counter is None:
            self._counter = _background_counter(("model_name",))
        self._counter.labels(self._model_name, task).inc(failures)


def _background_counter(labels: tuple[str, ...]) -> Any:
    from prometheus_client import Counter

    text = "Background tasks that failed and were started again."
    return Counter("coserve_background_failures", text, (*labels, "task"))


def _add(histogram: Any, buckets: Buckets) -> None:
    """Add what was gathered to one of Prometheus's, which takes single values only."""
    counts, sum_s = buckets.take()
    for value, count in zip(histogram._buckets, counts, strict=True):
        if count:
            value.inc(count)
    histogram._sum.inc(sum_s)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
