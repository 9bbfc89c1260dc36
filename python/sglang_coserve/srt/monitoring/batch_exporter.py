"""How the Batch API stands as Prometheus metrics (``--enable-metrics``)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from sglang_coserve.batch import BatchService
from sglang_coserve.batch.service_status import EXPORTED_STATES, Headroom, ServiceStatus

__all__ = ["BatchExporter", "batches_exported"]

_INTERVAL_S: Final = 1.0


class BatchExporter:
    """Publishes the state of the service; one exporter a process, that of the HTTP server.

    The names and meanings are listed in ``docs/metrics.md``.
    """

    def __init__(self, model_name: str) -> None:
        # SGLang sets where the processes of a server leave their metrics before the first import.
        from prometheus_client import Gauge

        def gauge(name: str, text: str, *labels: str) -> Any:
            names = ("model_name", *labels)
            return Gauge(f"coserve_{name}", text, names, multiprocess_mode="mostrecent")

        self._model_name = model_name
        self._batches = gauge("batches", "Unfinished batches by state.", "state")
        self._waiting = gauge("batch_lines_waiting", "Lines that the engine has yet to get.")
        self._required = gauge(
            "batch_required_tokens_per_second",
            "What all batches that are served need to be complete in their windows.",
        )

    def publish(self, status: ServiceStatus, headroom: Headroom) -> None:
        """Publish a moment of the service."""
        states = {**status.batches, "paused": status.paused_batches}
        self._set(states, status.lines_waiting, headroom.required_tokens_per_s)

    def publish_none(self) -> None:
        """Publish that no batches are served: whoever opens their directory counts them."""
        self._set({}, 0, 0.0)

    def _set(self, states: Mapping[str, int], lines_waiting: int, required: float) -> None:
        name = self._model_name
        for state in (*EXPORTED_STATES, "paused"):
            self._batches.labels(name, state).set(states.get(state, 0))
        self._waiting.labels(name).set(lines_waiting)
        self._required.labels(name).set(required)


@asynccontextmanager
async def batches_exported(service: BatchService, exporter: BatchExporter) -> AsyncGenerator[None]:
    """Within it, ``exporter`` publishes how ``service`` stands, once a second; then, nothing."""
    try:
        async with service.background.running("batch_metrics", lambda: _publish(service, exporter)):
            yield
    finally:
        exporter.publish_none()


async def _publish(service: BatchService, exporter: BatchExporter) -> None:
    while True:
        exporter.publish(await service.status(), service.headroom())
        await asyncio.sleep(_INTERVAL_S)
