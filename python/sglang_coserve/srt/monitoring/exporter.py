"""Prometheus metrics beside SGLang's (``--enable-metrics``): what there is, and its values.

Metrics are named as in ``docs/prometheus.md``, which is made from them: with their labels, without
``coserve_``; counters end with ``_total``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI

from sglang_coserve.batch.errors import BatchApiNotReadyError, BatchApiOffError
from sglang_coserve.batch.record import BATCH_METRICS, batch_values
from sglang_coserve.batch.routes.caller import find_service
from sglang_coserve.http_lines.engine_load import ReplicaLoad
from sglang_coserve.lines.background import (
    BACKGROUND_METRICS,
    TaskSupervisor,
    background_values,
)
from sglang_coserve.srt.admission.admission import OFFLINE_EVENTS
from sglang_coserve.srt.monitoring.latencies import (
    DELAY_BUCKETS_S,
    GAP_BUCKETS_S,
    WAIT_BUCKETS_S,
    LatencyHistograms,
)

REPLICA_METRICS: Final = {
    "requests{request_class,state}": "Requests now: state is waiting or running.",
    "online_outstanding_tokens": (
        "Tokens of online requests yet to be computed, as in /coserve/load."
    ),
    "kv_tokens{state}": "KV on the device: held by online requests, reclaimable for them, or free.",
    "reclaim_seconds": ("Predicted time until online requests can take reclaimable KV."),
    "headroom_tokens_per_second": ("What offline work would get now, as in /coserve/load."),
    "max_lines": "Offline requests that fit beside online ones, as in /coserve/load.",
    "slo_attainment": "Share of recent online requests that met their targets.",
    "slo_measured_seconds{slo}": "The statistic that an SLO bounds.",
    "slo_alone_seconds{slo}": "The same in the no-interference baseline, predicted.",
    "online_latency_seconds{latency,statistic}": (
        "Online requests of the last ten minutes: latency is ttft, tpot, tbt or e2e, statistic is "
        "p50 or p99."
    ),
    "online_latency_alone_seconds{latency,statistic}": (
        "The same in the no-interference baseline, predicted."
    ),
    "online_latency_ratio{latency,statistic}": "Measured ÷ alone, of requests that have both.",
    "stream_slowdown_ratio{statistic}": (
        "Mean gap of an online stream ÷ the mean gap of the same request alone: statistic is p50 "
        "or p99."
    ),
    "streams_kept_ratio": "Share of recent online streams that kept the promised pace.",
    "online_prompt_tokens_total": (
        "Prompt tokens of online requests with a first token both here and in the no-interference "
        "baseline."
    ),
    "online_cached_tokens_total": "Prompt tokens that these requests found in the cache.",
    "online_cached_tokens_alone_total": "Prompt tokens that these would have found alone.",
    "protected_kv_tokens": (
        "Cached tokens of recent online requests, which new offline requests leave in the cache."
    ),
    "prefix_lease_seconds": (
        "How long after its last use an online prefix counts as used just now for eviction; "
        "missing where the cache keeps no leases."
    ),
    "prediction_mape": "Mean absolute error of predicted step times, a fraction.",
    "prediction_bias": (
        "Mean error of predicted step times, a fraction; above 0: they were too long."
    ),
    "offline_events_total{event}": (
        "Offline requests received, admitted, parked, paused, resumed, retracted, put_back, "
        "aborted_waiting; suspended steps dropped."
    ),
    "online_shed_total": "Online requests refused under --overload shed.",
    "plans_failed_total": "Plans that failed; SGLang's own pass served those steps.",
    "advisory_off{part}": "1 for each part that failed and is off.",
    "unnoticed_ends_total": "Requests that left the engine unnoticed: 0, or a fault to report.",
    "safepoint_suspended_total{kind}": "Steps suspended; kind is extend, decode or mixed.",
    "safepoint_resumed_total": "Suspended steps that were resumed.",
    "safepoint_delay_seconds{step,statistic}": (
        "From an online arrival to its first token through a suspension, step by step: statistic "
        "is p50 or p99."
    ),
    "recompute_tax{request_class}": "Share of the computed tokens that had been computed before.",
    "kv_host_tokens": "KV tokens in host memory now; missing without checkpoints.",
    "kv_checkpoint_lag_tokens": (
        "KV tokens being copied to the host now; missing without checkpoints."
    ),
    "kv_checkpoint_events_total{event}": (
        "Events of the KV of offline requests, in tokens, bytes or occurrences, named as in "
        "/coserve/status; missing without checkpoints."
    ),
    "kv_move_events_total{event}": (
        "Tokens whose KV has moved between engines, and requests that moved without, named as in "
        "/coserve/status."
    ),
    "ttft_seconds{request_class}": "Time to first token, from the arrival at the HTTP server.",
    "itl_seconds{request_class}": "Gaps between tokens, in the scheduler.",
    "queue_seconds{request_class}": (
        "From the arrival at the HTTP server to a request's first step."
    ),
    "interference_seconds{token}": (
        "The bill: how much later than alone an online request had its first token, and its last."
    ),
    "prompt_tokens_total{request_class,source}": (
        "Prompt tokens of requests that ran: source is cached or computed."
    ),
    "oldest_waiting_seconds{request_class}": (
        "Age of the oldest waiting request, of those that have never run."
    ),
    "budget_seconds": (
        "Latency budget of offline work in the last plan that had one; +Inf before that."
    ),
    **BACKGROUND_METRICS,
}
_BOUNDS_S: Final = {
    "ttft_seconds": WAIT_BUCKETS_S,
    "itl_seconds": GAP_BUCKETS_S,
    "queue_seconds": WAIT_BUCKETS_S,
    "interference_seconds": DELAY_BUCKETS_S,
}
"""Of the histograms' buckets."""

_KV_STATE: Final = frozenset(("mode", "lag_tokens", "host_tokens", "host_limit_tokens"))
"""Figures of a store of KV that are no counts."""


class Exporter:
    """Publishes metrics; at most one exporter of a metric per process."""

    def __init__(self, metrics: Mapping[str, str], common: Mapping[str, str]) -> None:
        """``common`` are labels that all of them have."""
        # SGLang sets where the processes of a server leave their metrics before the first import.
        from prometheus_client import Counter, Gauge, Histogram

        self._common = tuple(common.values())
        self._totals: dict[tuple[str, ...], float] = {}
        self._metrics: dict[str, Any] = {}
        for pattern, text in metrics.items():
            name, *own = pattern.rstrip("}").replace("{", ",").split(",")
            described = (f"coserve_{name}", text, (*common, *own))
            if name in _BOUNDS_S:
                self._metrics[name] = Histogram(*described, buckets=_BOUNDS_S[name])
            elif name.endswith("_total"):
                self._metrics[name] = Counter(*described)
            else:
                self._metrics[name] = Gauge(*described, multiprocess_mode="mostrecent")

    def publish(self, values: Mapping[str, Any]) -> None:
        """Publish what is named: of a gauge its value, of a counter its total, which must not
        decrease, of a histogram ``Buckets``, which are emptied.

        With labels, a mapping of them, or of tuples of them, to that. None is not known, and
        changes nothing.
        """
        for name, found in values.items():
            metric = self._metrics[name]
            for key, value in (found if isinstance(found, Mapping) else {(): found}).items():
                labels = key if isinstance(key, tuple) else (key,)
                if value is None:
                    continue
                child = metric.labels(*self._common, *labels)
                if name in _BOUNDS_S:
                    # Prometheus's own take single values only.
                    counts, sum_s = value.take()
                    for bucket, count in zip(child._buckets, counts, strict=True):
                        bucket.inc(count)
                    child._sum.inc(sum_s)
                elif name.endswith("_total"):
                    child.inc(value - self._totals.get((name, *labels), 0))
                    self._totals[name, *labels] = value
                else:
                    child.set(value)


def state_values(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a replica's ``SchedulerStatus.state``."""
    slo, prediction, cache = state["slo"], state.get("prediction") or {}, state["cache"]
    kv, safepoints = state["kv_checkpoint"], state.get("safepoints") or {}
    if not safepoints.get("enabled"):
        safepoints = {}
    return {
        "requests": {
            (of, kind): state[of][kind]
            for of in ("online", "offline")
            for kind in ("waiting", "running")
        },
        "slo_attainment": slo["attainment"],
        "slo_measured_seconds": {
            each["slo"]: _seconds(each["measured_ms"]) for each in slo["measured"]
        },
        "slo_alone_seconds": {
            each["slo"]: _seconds(each["online_alone_ms"]) for each in slo["measured"]
        },
        "online_latency_seconds": _by_statistic(slo["latencies"], "measured_ms", 1e-3),
        "online_latency_alone_seconds": _by_statistic(slo["latencies"], "online_alone_ms", 1e-3),
        "online_latency_ratio": _by_statistic(slo["latencies"], "ratio"),
        "stream_slowdown_ratio": slo["streams"]["slowdown"],
        "streams_kept_ratio": slo["streams"]["kept_share"],
        "online_prompt_tokens_total": cache["online_prompt_tokens"],
        "online_cached_tokens_total": cache["found"],
        "online_cached_tokens_alone_total": cache["found_alone"],
        "protected_kv_tokens": cache["protected_tokens"],
        "prefix_lease_seconds": cache["lease_s"],
        "prediction_mape": prediction.get("mape"),
        "prediction_bias": prediction.get("bias"),
        "offline_events_total": {event: state["offline"][event] for event in OFFLINE_EVENTS},
        "online_shed_total": state["online"]["shed"],
        "plans_failed_total": state.get("plans_failed", 0),
        "unnoticed_ends_total": state["unnoticed_ends"],
        "safepoint_suspended_total": safepoints.get("suspended", {}),
        "safepoint_resumed_total": safepoints.get("resumed"),
        "safepoint_delay_seconds": {
            (step, statistic): _seconds(delays_ms[statistic])
            for step, delays_ms in safepoints.get("delays_ms", {}).items()
            for statistic in ("p50", "p99")
        },
        "recompute_tax": {of: values["tax"] for of, values in state["recompute"].items()},
        "kv_host_tokens": kv.get("host_tokens"),
        "kv_checkpoint_lag_tokens": kv.get("lag_tokens"),
        "kv_checkpoint_events_total": {
            event: count for event, count in kv.items() if event not in _KV_STATE
        },
        "kv_move_events_total": state["kv_moves"],
        **background_values(state["background"]),
    }


def load_values(load: ReplicaLoad) -> dict[str, Any]:
    """Return the values of a replica's load."""
    taken = {"online": load.online_kv_tokens, "reclaimable": load.reclaimable_kv_tokens}
    return {
        "online_outstanding_tokens": load.online.outstanding_tokens,
        "kv_tokens": {**taken, "free": load.kv_tokens - sum(taken.values())},
        "reclaim_seconds": load.reclaim_s,
        "headroom_tokens_per_second": load.headroom_tokens_per_s,
        "max_lines": load.max_lines,
    }


def latency_values(latencies: LatencyHistograms) -> dict[str, Any]:
    """Return the values of what was gathered since the last time."""
    cached, prompts = latencies.cached_tokens, latencies.prompt_tokens
    sources = {"cached": cached, "computed": {of: prompts[of] - cached[of] for of in prompts}}
    return {
        "ttft_seconds": latencies.ttft,
        "itl_seconds": latencies.gaps,
        "queue_seconds": latencies.queued,
        "interference_seconds": latencies.delays,
        "prompt_tokens_total": {
            (of, source): tokens
            for source, counts in sources.items()
            for of, tokens in counts.items()
        },
    }


def _by_statistic(
    latencies: Mapping[str, Any], name: str, factor: float = 1.0
) -> dict[tuple[str, str], float | None]:
    """Return the values of ``name`` by latency and statistic, times ``factor``."""
    return {
        (latency, statistic): None if value is None else value * factor
        for latency, compared in latencies.items()
        for statistic, value in compared[name].items()
    }


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


_INTERVAL_S: Final = 1.0

SERVER_METRICS: Final = {**BACKGROUND_METRICS, **BATCH_METRICS}
"""Of the process of the HTTP server."""


class ServerMetrics:
    """Publishes ``SERVER_METRICS``; one a process."""

    def __init__(self, app: FastAPI, model_name: str, background: TaskSupervisor) -> None:
        self._app = app
        self._background = background
        self._exporter = Exporter(SERVER_METRICS, {"model_name": model_name})

    async def run(self) -> None:
        """Publish once a second, for ever."""
        while True:
            await self.publish()
            await asyncio.sleep(_INTERVAL_S)

    async def publish(self) -> None:
        """Publish how background tasks and batches stand."""
        self._exporter.publish(background_values(self._background.state()))
        status, required_tokens_per_s = None, 0.0
        try:
            service = find_service(self._app)
            status = await service.status()
            required_tokens_per_s = service.headroom().required_tokens_per_s
        except BatchApiNotReadyError:
            pass
        except BatchApiOffError:
            return
        self._exporter.publish(batch_values(status, required_tokens_per_s))
