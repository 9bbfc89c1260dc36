"""What a real server under load sends over OTLP: metrics by tier, and spans of our own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from sglang_coserve.errors import ConfigError
from sglang_coserve.srt.monitoring.otel_metrics import (
    DURATION_BUCKETS_S,
    TPOT_BUCKETS_S,
    TTFT_BUCKETS_S,
    GenAiMetrics,
    provider_if_configured,
)
from srt.monitoring.otlp_collector import Collector, attributes_of
from srt.monitoring.watched import LINE_TOKENS, LINES, ONLINE_REQUESTS, Watched
from waiting import eventually


@dataclass(frozen=True)
class Traced:
    """A server whose load suspended a step, and what it sent."""

    watched: Watched
    collector: Collector


@pytest.fixture(scope="module")
def traced(watched: Watched, collector: Collector) -> Traced:
    watched.suspend_a_step()
    return Traced(watched, collector)


def points(traced: Traced, name: str, tier: str) -> list[Any]:
    """Of the requests that were answered: some lines are cancelled."""
    histogram = traced.collector.metrics[f"gen_ai.server.{name}"].histogram
    return [
        point
        for point in histogram.data_points
        if (said := attributes_of(point))["openai.response.service_tier"] == tier
        and "error.type" not in said
    ]


@pytest.mark.parametrize(
    ("name", "bounds_s"),
    [
        ("time_to_first_token", TTFT_BUCKETS_S),
        ("time_per_output_token", TPOT_BUCKETS_S),
        ("request.duration", DURATION_BUCKETS_S),
    ],
)
def test_every_request_is_in_its_histogram(
    traced: Traced, name: str, bounds_s: tuple[float, ...]
) -> None:
    def count(tier: str) -> int:
        return sum(point.count for point in points(traced, name, tier))

    eventually(lambda: f"gen_ai.server.{name}" in traced.collector.metrics)
    eventually(lambda: count("flex") >= LINES and count("default") >= ONLINE_REQUESTS)
    for point in (*points(traced, name, "flex"), *points(traced, name, "default")):
        assert list(point.explicit_bounds) == pytest.approx(bounds_s)
        said = attributes_of(point)
        assert said["gen_ai.response.model"] == "small"
        of_route = {"flex": "text_completion", "default": "generate_content"}
        assert said["gen_ai.operation.name"] == of_route[said["openai.response.service_tier"]]
        asked = said.get("openai.request.service_tier")
        assert asked == ("flex" if said["openai.response.service_tier"] == "flex" else None)
    assert traced.collector.metrics[f"gen_ai.server.{name}"].unit == "s"


def test_times_add_up(traced: Traced) -> None:
    """Of requests of one length: its first token, and each of the others."""

    def mean_s(name: str) -> float:
        found = points(traced, name, "flex")
        return sum(point.sum for point in found) / sum(point.count for point in found)

    whole_s = mean_s("time_to_first_token") + (LINE_TOKENS - 1) * mean_s("time_per_output_token")
    assert whole_s == pytest.approx(mean_s("request.duration"), rel=0.01)
    online = points(traced, "time_to_first_token", "default")
    seen_s = max(one.ttft_s for one in traced.watched.online)
    assert min(point.min for point in online) <= seen_s


def test_requests_have_tiers_and_suspensions_spans(traced: Traced) -> None:
    eventually(lambda: traced.collector.named("coserve suspended"))
    span = traced.collector.named("coserve suspended")[0]
    said = attributes_of(span)
    assert span.end_time_unix_nano > span.start_time_unix_nano
    assert 0 <= said["coserve.layer"] < 8
    assert said["coserve.outcome"] in ("resumed", "dropped")
    # It is below the request that was suspended, which is offline.
    spans = {one.span_id: one for one in list(traced.collector.spans)}
    parent = spans.get(span.parent_span_id)
    assert parent is None or parent.trace_id == span.trace_id
    eventually(lambda: "flex" in tiers(traced))
    assert tiers(traced) == {"flex", "default"}


def tiers(traced: Traced) -> set[str]:
    said = (attributes_of(span) for span in list(traced.collector.spans))
    name = "openai.response.service_tier"
    return {one[name] for one in said if name in one}


def test_spans_name_the_request_as_its_client_did(traced: Traced) -> None:
    def named() -> set[str]:
        spans = list(traced.collector.spans)
        values = [attributes_of(span).get("http.request.header.x-request-id") for span in spans]
        return {one.values[0].string_value for one in values if one is not None}

    expected = {f"online-{number}" for number in range(ONLINE_REQUESTS)}
    eventually(lambda: named() >= expected)


def test_billed_requests_have_their_delay(traced: Traced) -> None:
    eventually(lambda: traced.collector.named("coserve delay"))
    for span in traced.collector.named("coserve delay"):
        said = attributes_of(span)
        length_ms = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
        assert length_ms == pytest.approx(max(said["coserve.delay_ms"], 0), abs=0.01)
        assert "coserve.delay_ttft_ms" in said


def test_a_request_that_is_refused_before_it_runs_has_failed() -> None:
    """SGLang answers it by another message than one that has run."""
    from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import ReqState

    from sglang_coserve.srt.tokenizer.client_presence import ArrivalTimeStats
    from sglang_coserve.srt.tokenizer.tokenizer_manager import CoserveTokenizerManager

    class Manager(CoserveTokenizerManager):
        """With no more than ends a request."""

        enable_lora = incremental_streaming_output = False

        def __init__(self, state: ReqState) -> None:
            self.rid_to_state = {"a": state}
            self.child_rid_to_logical_rid: dict[str, str] = {}  # Of SGLang 0.5.17.
            self._otel_metrics = GenAiMetrics(MeterProvider([reader]), "small", "localhost", 1)

        def config_value(self, name: str) -> None:
            """Return the version of weights, which have none."""

    reader = InMemoryMetricReader()
    times = ArrivalTimeStats()
    times.set_created_time()
    manager = Manager(ReqState([], False, asyncio.Event(), GenerateReqInput(text="x"), times))
    for _ in range(2):  # Of a request that has ended, nothing is said.
        reason = {"type": "abort", "message": "overloaded", "err_type": "ServiceUnavailable"}
        manager._handle_abort_req(AbortReq(rid="a", finished_reason=reason))
    found = reader.get_metrics_data()
    assert found is not None
    (metric,) = found.resource_metrics[0].scope_metrics[0].metrics
    (point,) = metric.data.data_points
    assert (metric.name, point.count) == ("gen_ai.server.request.duration", 1)
    assert point.attributes["error.type"] == "ServiceUnavailable"


def test_without_an_endpoint_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert provider_if_configured() is None


def test_an_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier pigeon")
    with pytest.raises(ConfigError, match="use grpc or http/protobuf"):
        provider_if_configured()
