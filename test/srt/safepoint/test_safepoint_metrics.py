"""What is counted of aborts, and what of it is exported."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.srt.safepoint.arrival_watch import AbortRequest
from sglang_coserve.srt.safepoint.in_flight import BatchKind
from sglang_coserve.srt.safepoint.inbox import Arrival
from sglang_coserve.srt.safepoint.stats import SafepointStats
from srt.own_process import printed_by


def test_an_abort_is_followed_to_the_first_token() -> None:
    stats = SafepointStats()
    arrivals = tuple(Arrival(f"on{i}", 10, 1.0 + i / 10, 1.2, None) for i in range(2))
    stats.aborted(BatchKind.MIXED, AbortRequest(7, arrivals, raised_s=1.25), 1.5, 1.501)
    stats.wasted(0.5, BatchStats.of(prefills=[(300, 0)], decodes=[20]), layers_share=0.5)
    stats.results([SimpleNamespace(rid="on0", output_ids=[])], 1.6)
    stats.results([SimpleNamespace(rid="on0", output_ids=[5])], 2.0)
    stats.forget("on1")
    stats.results([SimpleNamespace(rid="on1", output_ids=[5])], 3.0)
    report = stats.report()
    assert report["aborts"] == {"extend": 0, "decode": 0, "mixed": 1}
    assert report["wasted_ms"] == 500
    assert report["wasted_tokens"] == round(301 / 2)
    delays = {name: summary["p50"] for name, summary in report["delays_ms"].items()}
    assert delays == pytest.approx(
        {
            "arrival_to_flag": 250,
            "flag_to_abort": 250,
            "arrival_to_abort": 500,
            "rollback": 1,
            "abort_to_first_token": 500,
            "arrival_to_first_token": 1000,
        }
    )
    assert report["delays_ms"]["arrival_to_first_token"]["n"] == 1


SCRIPT = """
from prometheus_client import generate_latest
from sglang_coserve.srt.exporter import Exporter

def state(aborts):
    return {
        "slo": {"attainment": None, "measured": []},
        "online": {"waiting": 0, "running": 0},
        "offline": {"waiting": 0, "running": 0},
        "safepoints": {
            "enabled": True,
            "aborts": {"extend": aborts, "mixed": 1},
            "shrunk": {"mixed": aborts // 2},
            "wasted_ms": 250.0 * aborts,
            "wasted_tokens": 100 * aborts,
            "delays_ms": {
                "arrival_to_abort": {"n": aborts, "p50": 12.5, "p90": 20.0, "p99": 25.0},
                "rollback": {"n": 0, "p50": None, "p90": None, "p99": None},
            },
        },
    }

exporter = Exporter("m")
exporter.publish(state(2), {}, 10.0)
exporter.publish(state(6), {}, 11.5)
print(generate_latest().decode())
"""


def test_aborts_and_delays_are_exported() -> None:
    lines = printed_by(SCRIPT)
    for line in (
        'coserve_safepoint_aborts_total{kind="extend",model_name="m"} 6.0',
        'coserve_safepoint_aborts_total{kind="mixed",model_name="m"} 1.0',
        'coserve_safepoint_shrunk_total{kind="mixed",model_name="m"} 3.0',
        'coserve_safepoint_wasted_seconds_total{model_name="m"} 1.5',
        'coserve_safepoint_wasted_tokens_total{model_name="m"} 600.0',
        'coserve_safepoint_delay_seconds{model_name="m",quantile="0.50",step="arrival_to_abort"} '
        "0.0125",
    ):
        assert line in lines
    assert not any("rollback" in line for line in lines)
