"""What is exported, from a state as the scheduler gives it."""

from __future__ import annotations

from srt.own_process import printed_by

SCRIPT = """
import math
from prometheus_client import generate_latest
from sglang_coserve.http_lines.engine_load import ClassLoad, ReplicaLoad
from sglang_coserve.srt.admission.admission import OFFLINE_EVENTS
from sglang_coserve.srt.kv_store import KvStore
from sglang_coserve.srt.monitoring.exporter import Exporter
from sglang_coserve.srt.monitoring.latencies import LatencyHistograms
from sglang_coserve.srt.monitoring.replica_metrics import (
    REPLICA_METRICS, ReplicaFigures, replica_values
)

load = ReplicaLoad(
    online=ClassLoad(running=4, waiting=1, outstanding_tokens=700),
    offline=ClassLoad(running=2, waiting=100000, outstanding_tokens=9000),
    kv_tokens=4096, online_kv_tokens=1000, reclaimable_kv_tokens=3000,
    reclaim_s=0.02, headroom_tokens_per_s=900.0, max_lines=6,
)

def state(running, retracted, kv):
    return {
        "slo": {"attainment": 0.75, "measured": [
            {"slo": "ttft p99 <= 300ms", "measured_ms": 250.0, "online_alone_ms": None}],
            "latencies": {"tbt": {
                "measured_ms": {"p50": 20.0, "p99": 30.0},
                "online_alone_ms": {"p50": 10.0, "p99": None},
                "ratio": {"p50": 2.0, "p99": None},
            }},
            "streams": {"slowdown": {"p50": 1.5, "p99": 1.75}, "kept_share": 0.99}},
        "cache": {"online_prompt_tokens": 1000 * running, "found": 450 * running,
            "found_alone": 500 * running, "protected_tokens": 64, "lease_s": None},
        "online": {"waiting": 1, "running": running, "shed": 3 * running},
        "offline": {
            "waiting": 100000, "running": 2,
            **dict.fromkeys(OFFLINE_EVENTS, 0), "retracted": retracted,
        },
        "unnoticed_ends": running // 4,
        "plans_failed": 0,
        "prediction": {"mape": 0.04, "bias": 0.0},
        "background": {"kv_expiry": {"failures": running}},
        "recompute": {"offline": {"tax": 0.25}, "online": {"tax": 0.0}},
        "kv_checkpoint": kv,
        "kv_moves": {"moved_in_tokens": 16 * running},
        "safepoints": {
            "enabled": True,
            "suspended": {"extend": 2 * running, "mixed": 1},
            "resumed": running - 1,
            "delays_ms": {
                "arrival_to_stop": {"n": running, "p50": 12.5, "p90": 20.0, "p99": 25.0},
                "stop_to_first_token": {"n": 0, "p50": None, "p90": None, "p99": None},
            },
        },
    }

def publish(*arguments):
    latencies = LatencyHistograms()
    latencies.ttft["online"].add(0.02)
    figures = ReplicaFigures(
        state(*arguments), load, latencies, {"offline": 30.0}, math.inf, {"recording": 1}
    )
    exporter.publish(replica_values(figures))

exporter = Exporter(REPLICA_METRICS, {"model_name": "m"})
publish(3, 2, KvStore().figures())
publish(4, 5, KvStore().figures())
assert "coserve_kv_host_tokens{" not in generate_latest().decode()
checkpoints = {"mode": "eager", "host_limit_tokens": 9, "host_tokens": 7,
    "lag_tokens": 3, "splits": 2}
publish(4, 5, checkpoints)
print(generate_latest().decode())
"""


def test_gauges_show_the_last_state_and_counters_add_up() -> None:
    lines = printed_by(SCRIPT)
    for line in (
        'coserve_requests{model_name="m",request_class="online",state="running"} 4.0',
        'coserve_requests{model_name="m",request_class="offline",state="waiting"} 100000.0',
        'coserve_offline_events_total{event="retracted",model_name="m"} 5.0',
        'coserve_online_shed_total{model_name="m"} 12.0',
        'coserve_background_failures_total{model_name="m",task="kv_expiry"} 4.0',
        'coserve_unnoticed_ends_total{model_name="m"} 1.0',
        'coserve_slo_attainment{model_name="m"} 0.75',
        'coserve_slo_measured_seconds{model_name="m",slo="ttft p99 <= 300ms"} 0.25',
        'coserve_online_latency_seconds{latency="tbt",model_name="m",statistic="p99"} 0.03',
        'coserve_online_latency_alone_seconds{latency="tbt",model_name="m",statistic="p50"} 0.01',
        'coserve_online_latency_ratio{latency="tbt",model_name="m",statistic="p50"} 2.0',
        'coserve_stream_slowdown_ratio{model_name="m",statistic="p99"} 1.75',
        'coserve_streams_kept_ratio{model_name="m"} 0.99',
        'coserve_online_prompt_tokens_total{model_name="m"} 4000.0',
        'coserve_online_cached_tokens_total{model_name="m"} 1800.0',
        'coserve_online_cached_tokens_alone_total{model_name="m"} 2000.0',
        'coserve_protected_kv_tokens{model_name="m"} 64.0',
        'coserve_prediction_mape{model_name="m"} 0.04',
        'coserve_oldest_waiting_seconds{model_name="m",request_class="offline"} 30.0',
        'coserve_kv_tokens{model_name="m",state="online"} 1000.0',
        'coserve_kv_tokens{model_name="m",state="free"} 96.0',
        'coserve_reclaim_seconds{model_name="m"} 0.02',
        'coserve_headroom_tokens_per_second{model_name="m"} 900.0',
        'coserve_max_lines{model_name="m"} 6.0',
        'coserve_advisory_off{model_name="m",part="recording"} 1.0',
        'coserve_ttft_seconds_count{model_name="m",request_class="online"} 3.0',
        'coserve_budget_seconds{model_name="m"} +Inf',
        'coserve_online_outstanding_tokens{model_name="m"} 700.0',
        'coserve_safepoint_suspended_total{kind="extend",model_name="m"} 8.0',
        'coserve_safepoint_suspended_total{kind="mixed",model_name="m"} 1.0',
        'coserve_safepoint_resumed_total{model_name="m"} 3.0',
        'coserve_recompute_tax{model_name="m",request_class="offline"} 0.25',
        'coserve_kv_host_tokens{model_name="m"} 7.0',
        'coserve_kv_checkpoint_lag_tokens{model_name="m"} 3.0',
        'coserve_kv_checkpoint_events_total{event="splits",model_name="m"} 2.0',
        'coserve_kv_move_events_total{event="moved_in_tokens",model_name="m"} 64.0',
        'coserve_safepoint_delay_seconds{model_name="m",statistic="p50",step="arrival_to_stop"} '
        "0.0125",
    ):
        assert line in lines
    for unknown in (
        "coserve_slo_alone_seconds{",
        "coserve_prefix_lease_seconds{",
    ):
        assert not any(line.startswith(unknown) for line in lines)
    assert not any("stop_to_first_token" in line for line in lines)
    assert not any("host_limit_tokens" in line for line in lines)
