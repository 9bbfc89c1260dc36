"""Publishes Prometheus metrics beside SGLang's (``--enable-metrics``).

A metric is named with its labels, without ``coserve_``; counters end with ``_total``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI

from sglang_coserve.batch.errors import BatchApiNotReadyError, BatchApiOffError
from sglang_coserve.batch.record import BATCH_METRICS, batch_values
from sglang_coserve.batch.routes.service import find_service
from sglang_coserve.lines.background import (
    BACKGROUND_METRICS,
    TaskSupervisor,
    background_values,
)
from sglang_coserve.srt.monitoring.latencies import (
    DELAY_BUCKETS_S,
    GAP_BUCKETS_S,
    WAIT_BUCKETS_S,
)

_BOUNDS_S: Final = {
    "ttft_seconds": WAIT_BUCKETS_S,
    "itl_seconds": GAP_BUCKETS_S,
    "queue_seconds": WAIT_BUCKETS_S,
    "interference_seconds": DELAY_BUCKETS_S,
}
"""Of the histograms' buckets."""


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
