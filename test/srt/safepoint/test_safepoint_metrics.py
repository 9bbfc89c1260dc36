"""What is counted of suspensions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_coserve.srt.forward_kind import ForwardKind
from sglang_coserve.srt.safepoint.ingress import Arrival, StopRequest
from sglang_coserve.srt.safepoint.safepoints import SafepointStats


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
