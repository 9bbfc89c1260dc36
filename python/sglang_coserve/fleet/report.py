"""What a gateway reports of its engines: ``/coserve/status``, ``/metrics``, and on the page."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sglang_coserve.batch.record import BATCH_METRICS, ServiceStatus, batch_values
from sglang_coserve.batch.routes.view import VIEW_PATH
from sglang_coserve.errors import RequestError, ServerError
from sglang_coserve.fleet.backend import FleetBackend
from sglang_coserve.fleet.engine import EngineState, RemoteEngine
from sglang_coserve.http_lines.messages import decode_message
from sglang_coserve.lines.background import BACKGROUND_METRICS, background_values

_PATH: Final = f"{VIEW_PATH}?since={1 << 40}"
"""Without the history, which is of a time before."""

_FRESH_S: Final = 1.0
"""As long as an engine's own sample: however many look, it is asked once."""

_TIMEOUT_S: Final = 3.0
"""Who looks at the fleet is not to wait for an engine that hangs."""

_log = logging.getLogger(__name__)


class Bill(msgspec.Struct, frozen=True):
    """What offline work cost them, as ``History.bill`` has it."""

    requests: float = 0
    mean_ms: float = 0.0
    ttft_ms: float = 0.0
    gaps_ms: float = 0.0


class OnlineUsers(msgspec.Struct, frozen=True):
    """What an engine says of them, as ``view.standing`` has it; it may be of another version."""

    level: str
    text: str = ""
    requests: int = 0
    bill: Bill | None = None


class _EngineView(msgspec.Struct, frozen=True):
    online_users: OnlineUsers


class EngineViews:
    """Asks engines as their operator, which the gateway is: it has their admin key."""

    def __init__(self) -> None:
        self._asking: asyncio.Task[Mapping[str, OnlineUsers]] | None = None
        self._asked_s = 0.0

    async def online_users(self, engines: Iterable[RemoteEngine]) -> Mapping[str, OnlineUsers]:
        """Return what is known, by the engines' addresses; at most one second old."""
        now_s = time.monotonic()
        if self._asking is None or now_s - self._asked_s >= _FRESH_S:
            self._asked_s = now_s
            self._asking = asyncio.create_task(_ask_all(list(engines)))
        # One who does not wait any more is not to take the answer from the others.
        return await asyncio.shield(self._asking)


async def _ask_all(engines: list[RemoteEngine]) -> Mapping[str, OnlineUsers]:
    there = [engine for engine in engines if engine.state is not EngineState.DOWN]
    found = await asyncio.gather(*map(_ask, there))
    return {
        engine.url: users for engine, users in zip(there, found, strict=True) if users is not None
    }


async def _ask(engine: RemoteEngine) -> OnlineUsers | None:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            content = await engine.http.ask(_PATH)
        return decode_message(content, _EngineView).online_users
    except (TimeoutError, ServerError, RequestError) as error:
        _log.debug("%s does not say how its online users stand: %s", engine.url, error)
        return None


def fleet_status(fleet: FleetBackend) -> dict[str, Any]:
    """Return the state of a fleet in plain values."""
    return {
        "model": fleet.model or None,
        "lines_waiting": fleet.lines_waiting,
        **{f"lines_{end}": count for end, count in fleet.ends.items()},
        "left_out": fleet.engines.left_out,
        "engines": [_engine_status(fleet, engine) for engine in fleet.engines],
    }


def fleet_metrics(
    fleet: FleetBackend,
    batches: ServiceStatus | None,
    required_tokens_per_s: float,
    background: Mapping[str, Mapping[str, Any]],
) -> bytes:
    """Return the same, and the numbers of the Batch API, for Prometheus.

    Without ``batches`` there is no Batch API now. ``background`` is ``TaskSupervisor.state``.
    """
    values = fleet_values(fleet) | background_values(background)
    model = {}
    if batches is not None:
        values |= batch_values(batches, required_tokens_per_s)
        model = {"model_name": fleet.engines.served.name}
    registry = CollectorRegistry()
    registry.register(Families(GATEWAY_METRICS | BACKGROUND_METRICS, values))
    registry.register(Families(BATCH_METRICS, values, model))
    return generate_latest(registry)


def _engine_status(fleet: FleetBackend, engine: RemoteEngine) -> dict[str, Any]:
    report, reason = engine.last_report, engine.reason
    if engine.is_up and engine.model != fleet.model:
        reason = f"it serves the model {engine.model}"
    return {
        "url": engine.url,
        "pool": engine.pool,
        "state": engine.state.value,
        "takes_no_lines_because": reason,
        "model": engine.model,
        "models": list(engine.models),
        "window": engine.window,
        "lines_in_flight": fleet.lines_in(engine),
        "lines_served": engine.lines_served,
        "lines_lost": engine.lines_lost,
        "offline_tokens_per_s": engine.rate.per_s(),
        "load": report
        and {
            "online": {"running": report.online_running},
            "offline": {"running": report.running, "waiting": report.waiting},
        },
    }


GATEWAY_METRICS: Final = {
    "gateway_engines{state}": "Engines now, by state.",
    "gateway_attempts_total{end}": (
        "Attempts at lines that ended without an answer: moved, cut (the connection broke), "
        "engine_lost, given_up; pulled and returned, with pools."
    ),
    "gateway_lines_waiting": "Lines for which no engine has room now.",
    "gateway_lines_in_flight{engine}": "Lines that an engine has.",
    "gateway_lines_served_total{engine}": "Lines that an engine has answered.",
    "gateway_tokens_total": "Prompt and output tokens of lines.",
}
"""Metrics for Prometheus, with their labels, without ``coserve_``."""


def fleet_values(fleet: FleetBackend) -> dict[str, Any]:
    """Return the values of ``GATEWAY_METRICS``."""
    states = Counter(engine.state for engine in fleet.engines)
    return {
        "gateway_engines": {state.value: states[state] for state in EngineState},
        "gateway_attempts_total": {
            "engine_lost" if end == "lost" else end: count for end, count in fleet.ends.items()
        },
        "gateway_lines_waiting": fleet.lines_waiting,
        "gateway_lines_in_flight": {each.url: fleet.lines_in(each) for each in fleet.engines},
        "gateway_lines_served_total": {each.url: each.lines_served for each in fleet.engines},
        "gateway_tokens_total": fleet.load().total_tokens,
    }


class Families(Collector):
    """A table of metrics with their values at one moment."""

    def __init__(
        self,
        metrics: Mapping[str, str],
        values: Mapping[str, Any],
        common: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``common`` are labels that all of them have; a metric without a value is left out."""
        self._metrics = metrics
        self._values = values
        self._common = common

    def collect(self) -> Iterator[Metric]:
        """Yield what there is to tell."""
        for pattern, text in self._metrics.items():
            name, *labels = pattern.rstrip("}").replace("{", ",").split(",")
            if (found := self._values.get(name)) is None:
                continue
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(f"coserve_{name}", text, labels=[*self._common, *labels])
            for label, value in (found if labels else {None: found}).items():
                own = [] if label is None else [label]
                family.add_metric([*self._common.values(), *own], value)
            yield family
