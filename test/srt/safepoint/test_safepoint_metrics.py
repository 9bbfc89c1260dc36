"""What is counted of suspensions, and what of it is exported."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_coserve.srt.forward_kind import ForwardKind
from sglang_coserve.srt.safepoint.ingress import Arrival, StopRequest
from sglang_coserve.srt.safepoint.safepoints import SafepointStats
from srt.own_process import printed_by


def test_a_suspension_is_followed_to_the_first_token() -> None:
    stats = SafepointStats()
    arrivals = tuple(Arrival(f"on{i}", 1.0 + i / 10) for i in range(2))
    stats.suspended(ForwardKind.MIXED, StopRequest(arrivals, raised_s=1.25), 1.5)
    stats.suspended(ForwardKind.EXTEND, None, 1.7)  # Its time was up.
    stats.results([SimpleNamespace(rid="on0", output_ids=[])], 1.6)
    stats.results([SimpleNamespace(rid="on0", output_ids=[5])], 2.0)
    stats.forget("on1")
    stats.results([SimpleNamespace(rid="on1", output_ids=[5])], 3.0)
    report = stats.report()
    assert report["suspended"] == {"extend": 1, "decode": 0, "mixed": 1}
    delays = {name: summary["p50"] for name, summary in report["delays_ms"].items()}
    assert delays == pytest.approx(
        {
            "arrival_to_flag": 250,
            "flag_to_stop": 250,
            "arrival_to_stop": 500,
            "stop_to_first_token": 500,
            "arrival_to_first_token": 1000,
        }
    )
    assert report["delays_ms"]["arrival_to_first_token"]["n"] == 1


SCRIPT = """
from prometheus_client import generate_latest
from sglang_coserve.srt.monitoring.exporter import Exporter

def state(count):
    return {
        "slo": {"attainment": None, "measured": []},
        "online": {"waiting": 0, "running": 0, "shed": 0},
        "unnoticed_ends": 0,
        "background": {},
        "offline": {"waiting": 0, "running": 0},
        "safepoints": {
            "enabled": True,
            "suspended": {"extend": count, "mixed": 1},
            "resumed": count - 1,
            "delays_ms": {
                "arrival_to_stop": {"n": count, "p50": 12.5, "p90": 20.0, "p99": 25.0},
                "flag_to_stop": {"n": 0, "p50": None, "p90": None, "p99": None},
            },
        },
    }

exporter = Exporter("m")
exporter.publish(state(2), {}, 10.0)
exporter.publish(state(6), {}, 11.5)
print(generate_latest().decode())
"""


def test_suspensions_and_delays_are_exported() -> None:
    lines = printed_by(SCRIPT)
    for line in (
        'coserve_safepoint_suspended_total{kind="extend",model_name="m"} 6.0',
        'coserve_safepoint_suspended_total{kind="mixed",model_name="m"} 1.0',
        'coserve_safepoint_resumed_total{model_name="m"} 5.0',
        'coserve_safepoint_delay_seconds{model_name="m",statistic="p50",step="arrival_to_stop"} '
        "0.0125",
    ):
        assert line in lines
    assert not any("flag_to_stop" in line for line in lines)
