"""A receiver of OTLP over HTTP in the process of the tests."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from web_server import Call, web_server


class Collector:
    """Keeps what was sent to it: the last value of each metric, and every span."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Any] = []
        self.metrics: dict[str, Any] = {}

    @property
    def environment(self) -> dict[str, str]:
        """What a server is told in its environment."""
        return {
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{self.url}/v1/metrics",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
        }

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    self.spans += scope.spans
        else:
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for scope in resource.scope_metrics:
                    self.metrics |= {metric.name: metric for metric in scope.metrics}

    def named(self, name: str) -> list[Any]:
        """The spans of a name that have come so far."""
        return [span for span in list(self.spans) if span.name == name]


def attributes_of(thing: Any) -> dict[str, Any]:
    """The attributes of a span or a data point as plain values."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in thing.attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """Receive on a free port of loopback."""

    def take(call: Call) -> None:
        body = call.content
        if call.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        collector.take(call.path, body)
        call.answer(content_type="application/x-protobuf")

    with web_server(take) as server:
        collector = Collector(server.url)
        yield collector
