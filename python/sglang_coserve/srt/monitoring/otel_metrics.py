"""Latencies of requests as OpenTelemetry's semantic conventions have them, sent over OTLP.

Recorded once for a request, in the process of the HTTP server, and only where the environment
names an endpoint. The package is the extra ``otel``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar
from importlib import import_module
from typing import Any, Final

from sglang_coserve.errors import ConfigError, require
from sglang_coserve.srt.marks.request_marks import is_offline

TTFT_BUCKETS_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TPOT_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
DURATION_BUCKETS_S: Final = tuple(0.01 * 2**power for power in range(14))
"""All three as the conventions for generative AI advise."""

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_OTHER_OPERATION: Final = "generate_content"

_OPERATION: Final[ContextVar[str]] = ContextVar("what is asked for", default=_OTHER_OPERATION)


def note_operation(path: str) -> None:
    """Note, for the request served in this context, what its route is for."""
    _OPERATION.set(_OPERATIONS.get(path, _OTHER_OPERATION))


def operation() -> str:
    """Return what the route of the request served in this context is for."""
    return _OPERATION.get()


def tier_attributes(request: Any) -> dict[str, str]:
    """Return the service tier that a request of SGLang's asked for, and the one that it has.

    Asked for is left out for online requests: they may have said any tier but ``flex``, or none.
    """
    if is_offline(request):
        return {"openai.request.service_tier": "flex", "openai.response.service_tier": "flex"}
    return {"openai.response.service_tier": "default"}


class GenAiMetrics:
    """The histograms ``gen_ai.server.*`` of one server."""

    def __init__(self, provider: Any, model_name: str, host: str, port: int) -> None:
        """``provider`` is a ``MeterProvider`` of OpenTelemetry's SDK."""
        self._common = {
            "gen_ai.provider.name": "sglang",
            "gen_ai.request.model": model_name,
            "gen_ai.response.model": model_name,
            "server.address": host,
            "server.port": port,
        }
        meter = provider.get_meter("sglang_coserve")

        def histogram(name: str, text: str, bounds_s: tuple[float, ...]) -> Any:
            return meter.create_histogram(
                f"gen_ai.server.{name}",
                unit="s",
                description=text,
                explicit_bucket_boundaries_advisory=list(bounds_s),
            )

        self._ttft = histogram("time_to_first_token", "Time to first token.", TTFT_BUCKETS_S)
        self._tpot = histogram(
            "time_per_output_token", "Time per output token after the first.", TPOT_BUCKETS_S
        )
        self._duration = histogram("request.duration", "Time of a request.", DURATION_BUCKETS_S)

    def finished(self, times: Any, output_tokens: int, error: str | None) -> None:
        """Record a request that has ended, by its ``ArrivalTimeStats``; one that failed, for
        ``error``, has a duration alone."""
        all_attributes = {**self._common, **times.attributes}
        if error is not None:
            all_attributes["error.type"] = error
        self._duration.record(times.get_e2e_latency(), all_attributes)
        if error is not None or not times.first_token_time or not output_tokens:
            return
        self._ttft.record(times.get_first_token_latency(), all_attributes)
        if output_tokens > 1:
            per_token_s = (times.finished_time - times.first_token_time) / (output_tokens - 1)
            self._tpot.record(per_token_s, all_attributes)


def provider_if_configured() -> Callable[[], Any] | None:
    """Return what makes a ``MeterProvider``; None where the environment names no endpoint.

    The variables are OpenTelemetry's: endpoint, protocol, headers, interval, resource.

    Raises:
        ConfigError: an endpoint is named, and the protocol is none of OTLP's.
        MissingExtraError: an endpoint is named, and the packages are not installed.
    """
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return None
    protocol = next(filter(None, map(os.environ.get, _PROTOCOLS)), "http/protobuf")
    if protocol not in ("grpc", "http/protobuf"):
        raise ConfigError(f"{_PROTOCOLS[0]} is {protocol!r}: use grpc or http/protobuf")
    require("otel", f"{_ENDPOINTS[0]} is set, and that")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    kind = protocol.removesuffix("/protobuf")
    exporters = import_module(f"opentelemetry.exporter.otlp.proto.{kind}.metric_exporter")
    return lambda: MeterProvider([PeriodicExportingMetricReader(exporters.OTLPMetricExporter())])
