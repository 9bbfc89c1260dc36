"""The Prometheus metrics of a replica: a table of names, texts and values.

Metrics are named as in ``docs/prometheus.md``, which is made from the table: with their labels,
without ``coserve_``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sglang_coserve.http_lines.engine_load import ReplicaLoad
from sglang_coserve.lines.background import BACKGROUND_METRICS, background_values
from sglang_coserve.srt.admission.admission import OFFLINE_EVENTS
from sglang_coserve.srt.monitoring.latencies import LatencyHistograms


@dataclass(frozen=True)
class ReplicaFigures:
    """The figures of a replica now."""

    state: Mapping[str, Any]
    """``SchedulerStatus.state``."""

    load: ReplicaLoad
    latencies: LatencyHistograms
    """Latencies since the last figures."""

    oldest_waiting_s: Mapping[str, float]
    """Age of the oldest waiting request by class, in seconds."""

    budget_s: float
    """Budget of offline work in the last plan that had one, in seconds."""

    off: Mapping[str, int] = field(default_factory=dict)
    """1 for each part that failed and is off."""

    @property
    def safepoints(self) -> Mapping[str, Any]:
        """The figures of safepoints; empty without safepoints."""
        safepoints: Mapping[str, Any] = self.state["safepoints"]
        return safepoints if safepoints["enabled"] else {}


_NO_COUNTS: Final = frozenset(("mode", "lag_tokens", "host_tokens", "host_limit_tokens"))
"""Figures of a store of KV that are no counts."""


def _kv_tokens(load: ReplicaLoad) -> dict[str, int]:
    taken = {"online": load.online_kv_tokens, "reclaimable": load.reclaimable_kv_tokens}
    return {**taken, "free": load.kv_tokens - sum(taken.values())}


def _by_slo(state: Mapping[str, Any], name: str) -> dict[str, float | None]:
    return {each["slo"]: _seconds(each[name]) for each in state["slo"]["measured"]}


def _by_latency(
    state: Mapping[str, Any], name: str, factor: float = 1.0
) -> dict[tuple[str, str], float | None]:
    """Return the values of ``name`` by latency and statistic, times ``factor``."""
    return {
        (latency, statistic): None if value is None else value * factor
        for latency, compared in state["slo"]["latencies"].items()
        for statistic, value in compared[name].items()
    }


def _delays(safepoints: Mapping[str, Any]) -> dict[tuple[str, str], float | None]:
    return {
        (step, statistic): _seconds(delays_ms[statistic])
        for step, delays_ms in safepoints.get("delays_ms", {}).items()
        for statistic in ("p50", "p99")
    }


def _prompt_tokens(latencies: LatencyHistograms) -> dict[tuple[str, str], int]:
    cached, prompts = latencies.cached_tokens, latencies.prompt_tokens
    computed = {of: prompts[of] - cached[of] for of in prompts}
    return {
        (of, source): tokens
        for source, counts in (("cached", cached), ("computed", computed))
        for of, tokens in counts.items()
    }


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


_TABLE: Final[Mapping[str, tuple[str, Callable[[ReplicaFigures], Any]]]] = {
    "requests{request_class,state}": (
        "Requests now: state is waiting or running.",
        lambda now: {
            (of, kind): now.state[of][kind]
            for of in ("online", "offline")
            for kind in ("waiting", "running")
        },
    ),
    "online_outstanding_tokens": (
        "Tokens of online requests yet to be computed, as in /coserve/load.",
        lambda now: now.load.online.outstanding_tokens,
    ),
    "kv_tokens{state}": (
        "KV on the device: held by online requests, reclaimable for them, or free.",
        lambda now: _kv_tokens(now.load),
    ),
    "reclaim_seconds": (
        "Predicted time until online requests can take reclaimable KV.",
        lambda now: now.load.reclaim_s,
    ),
    "headroom_tokens_per_second": (
        "What offline work would get now, as in /coserve/load.",
        lambda now: now.load.headroom_tokens_per_s,
    ),
    "max_lines": (
        "Offline requests that fit beside online ones, as in /coserve/load.",
        lambda now: now.load.max_lines,
    ),
    "slo_attainment": (
        "Share of recent online requests that met their targets.",
        lambda now: now.state["slo"]["attainment"],
    ),
    "slo_measured_seconds{slo}": (
        "The statistic that an SLO bounds.",
        lambda now: _by_slo(now.state, "measured_ms"),
    ),
    "slo_alone_seconds{slo}": (
        "The same in the no-interference baseline, predicted.",
        lambda now: _by_slo(now.state, "online_alone_ms"),
    ),
    "online_latency_seconds{latency,statistic}": (
        (
            "Online requests of the last ten minutes: latency is ttft, tpot, tbt or e2e, "
            "statistic is p50 or p99."
        ),
        lambda now: _by_latency(now.state, "measured_ms", 1e-3),
    ),
    "online_latency_alone_seconds{latency,statistic}": (
        "The same in the no-interference baseline, predicted.",
        lambda now: _by_latency(now.state, "online_alone_ms", 1e-3),
    ),
    "online_latency_ratio{latency,statistic}": (
        "Measured ÷ alone, of requests that have both.",
        lambda now: _by_latency(now.state, "ratio"),
    ),
    "stream_slowdown_ratio{statistic}": (
        (
            "Mean gap of an online stream ÷ the mean gap of the same request alone: statistic "
            "is p50 or p99."
        ),
        lambda now: now.state["slo"]["streams"]["slowdown"],
    ),
    "streams_kept_ratio": (
        "Share of recent online streams that kept the promised pace.",
        lambda now: now.state["slo"]["streams"]["kept_share"],
    ),
    "online_prompt_tokens_total": (
        (
            "Prompt tokens of online requests with a first token both here and in the no-"
            "interference baseline."
        ),
        lambda now: now.state["cache"]["online_prompt_tokens"],
    ),
    "online_cached_tokens_total": (
        "Prompt tokens that these requests found in the cache.",
        lambda now: now.state["cache"]["found"],
    ),
    "online_cached_tokens_alone_total": (
        "Prompt tokens that these would have found alone.",
        lambda now: now.state["cache"]["found_alone"],
    ),
    "protected_kv_tokens": (
        ("Cached tokens of recent online requests, which new offline requests leave in the cache."),
        lambda now: now.state["cache"]["protected_tokens"],
    ),
    "prefix_lease_seconds": (
        (
            "How long after its last use an online prefix counts as used just now for eviction;"
            " missing where the cache keeps no leases."
        ),
        lambda now: now.state["cache"]["lease_s"],
    ),
    "prediction_mape": (
        "Mean absolute error of predicted step times, a fraction.",
        lambda now: now.state["prediction"]["mape"],
    ),
    "prediction_bias": (
        "Mean error of predicted step times, a fraction; above 0: they were too long.",
        lambda now: now.state["prediction"]["bias"],
    ),
    "offline_events_total{event}": (
        (
            "Offline requests received, admitted, parked, paused, resumed, retracted, put_back,"
            " aborted_waiting; suspended steps dropped."
        ),
        lambda now: {event: now.state["offline"][event] for event in OFFLINE_EVENTS},
    ),
    "online_shed_total": (
        "Online requests refused under --overload shed.",
        lambda now: now.state["online"]["shed"],
    ),
    "plans_failed_total": (
        "Plans that failed; SGLang's own pass served those steps.",
        lambda now: now.state["plans_failed"],
    ),
    "advisory_off{part}": (
        "1 for each part that failed and is off.",
        lambda now: now.off,
    ),
    "unnoticed_ends_total": (
        "Requests that left the engine unnoticed: 0, or a fault to report.",
        lambda now: now.state["unnoticed_ends"],
    ),
    "safepoint_suspended_total{kind}": (
        "Steps suspended; kind is extend, decode or mixed.",
        lambda now: now.safepoints.get("suspended", {}),
    ),
    "safepoint_resumed_total": (
        "Suspended steps that were resumed.",
        lambda now: now.safepoints.get("resumed"),
    ),
    "safepoint_delay_seconds{step,statistic}": (
        (
            "From an online arrival to its first token through a suspension, step by step: "
            "statistic is p50 or p99."
        ),
        lambda now: _delays(now.safepoints),
    ),
    "recompute_tax{request_class}": (
        "Share of the computed tokens that had been computed before.",
        lambda now: {of: each["tax"] for of, each in now.state["recompute"].items()},
    ),
    "kv_host_tokens": (
        "KV tokens in host memory now; missing without checkpoints.",
        lambda now: now.state["kv_checkpoint"].get("host_tokens"),
    ),
    "kv_checkpoint_lag_tokens": (
        "KV tokens being copied to the host now; missing without checkpoints.",
        lambda now: now.state["kv_checkpoint"].get("lag_tokens"),
    ),
    "kv_checkpoint_events_total{event}": (
        (
            "Events of the KV of offline requests, in tokens, bytes or occurrences, named as in"
            " /coserve/status; missing without checkpoints."
        ),
        lambda now: {
            event: count
            for event, count in now.state["kv_checkpoint"].items()
            if event not in _NO_COUNTS
        },
    ),
    "kv_move_events_total{event}": (
        (
            "Tokens whose KV has moved between engines, and requests that moved without, named "
            "as in /coserve/status."
        ),
        lambda now: now.state["kv_moves"],
    ),
    "ttft_seconds{request_class}": (
        "Time to first token, from the arrival at the HTTP server.",
        lambda now: now.latencies.ttft,
    ),
    "itl_seconds{request_class}": (
        "Gaps between tokens, in the scheduler.",
        lambda now: now.latencies.gaps,
    ),
    "queue_seconds{request_class}": (
        "From the arrival at the HTTP server to a request's first step.",
        lambda now: now.latencies.queued,
    ),
    "interference_seconds{token}": (
        (
            "The bill: how much later than alone an online request had its first token, and its"
            " last."
        ),
        lambda now: now.latencies.delays,
    ),
    "prompt_tokens_total{request_class,source}": (
        "Prompt tokens of requests that ran: source is cached or computed.",
        lambda now: _prompt_tokens(now.latencies),
    ),
    "oldest_waiting_seconds{request_class}": (
        "Age of the oldest waiting request, of those that have never run.",
        lambda now: now.oldest_waiting_s,
    ),
    "budget_seconds": (
        "Latency budget of offline work in the last plan that had one; +Inf before that.",
        lambda now: now.budget_s,
    ),
}
"""By name with labels: the text, and the value (``Exporter.publish``). Counters end with
``_total``."""

REPLICA_METRICS: Final = {name: text for name, (text, _) in _TABLE.items()} | BACKGROUND_METRICS
"""The texts by name with labels."""


def replica_values(now: ReplicaFigures) -> dict[str, Any]:
    """Return the value of each metric by name without labels."""
    values = {name.partition("{")[0]: value(now) for name, (_, value) in _TABLE.items()}
    return values | background_values(now.state["background"])
