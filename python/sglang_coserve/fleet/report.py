"""What a gateway reports of its engines: ``/coserve/status``, ``/metrics``, and on the page."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sglang_coserve.batch.record import UNFINISHED, ServiceStatus
from sglang_coserve.batch.routes.view import VIEW_PATH
from sglang_coserve.errors import RequestError, ServerError
from sglang_coserve.fleet.backend import FleetBackend
from sglang_coserve.fleet.engine import EngineState, RemoteEngine
from sglang_coserve.http_lines.messages import decode_message

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
            content = await engine.connection.ask(_PATH)
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
        "prompts_pushed": fleet.prompts_pushed,
        "left_out": fleet.left_out,
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
    registry = CollectorRegistry()
    registry.register(FleetFamilies(fleet, batches, required_tokens_per_s, background))
    return generate_latest(registry)


def _engine_status(fleet: FleetBackend, engine: RemoteEngine) -> dict[str, Any]:
    load = engine.load
    reason = engine.reason
    if engine.model is not None and engine.model != fleet.model:
        reason = f"it serves the model {engine.model}"
    return {
        "url": engine.url,
        "pool": engine.pool,
        "state": engine.state.value,
        "takes_no_lines_because": reason,
        "model": engine.description.model if engine.description else None,
        "window": engine.window,
        "lines_in_flight": fleet.lines_in(engine),
        "lines_served": engine.lines_served,
        "lines_lost": engine.lines_lost,
        "offline_tokens_per_s": engine.rate.per_s(),
        "load": load.model_dump(include={"online", "offline"}) if load else None,
    }


class FleetFamilies(Collector):
    """A gateway's metrics, of one moment; see ``fleet_metrics``."""

    def __init__(
        self,
        fleet: FleetBackend,
        batches: ServiceStatus | None,
        required_tokens_per_s: float,
        background: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._fleet = fleet
        self._batches = batches
        self._required_tokens_per_s = required_tokens_per_s
        self._background = background

    def collect(self) -> Iterator[Metric]:
        """Yield what there is to tell."""
        fleet, name = self._fleet, "coserve_gateway"
        states = Counter(engine.state for engine in fleet.engines)
        engines = GaugeMetricFamily(f"{name}_engines", "Engines now, by state.", labels=["state"])
        for state in EngineState:
            engines.add_metric([state.value], states[state])
        yield engines
        attempts = CounterMetricFamily(
            f"{name}_attempts",
            "Attempts at lines that ended without an answer: moved, engine_lost, given_up; pulled "
            "and returned, with pools.",
            labels=["end"],
        )
        for end, count in fleet.ends.items():
            attempts.add_metric(["engine_lost" if end == "lost" else end], count)
        yield attempts
        waiting = "Lines for which no engine has room now."
        yield GaugeMetricFamily(f"{name}_lines_waiting", waiting, fleet.lines_waiting)
        in_flight = GaugeMetricFamily(
            f"{name}_lines_in_flight", "Lines that an engine has.", labels=["engine"]
        )
        served = CounterMetricFamily(
            f"{name}_lines_served", "Lines that an engine has answered.", labels=["engine"]
        )
        for engine in fleet.engines:
            in_flight.add_metric([engine.url], fleet.lines_in(engine))
            served.add_metric([engine.url], engine.lines_served)
        yield in_flight
        yield served
        tokens = "Prompt and output tokens of lines."
        yield CounterMetricFamily(f"{name}_tokens", tokens, fleet.load().total_tokens)
        failures = CounterMetricFamily(
            "coserve_background_failures",
            "Background tasks that failed and were started again.",
            labels=["task"],
        )
        for task, background in self._background.items():
            failures.add_metric([task], background["failures"])
        yield failures
        if self._batches is not None:
            yield from self._batch_families(self._batches)

    def _batch_families(self, status: ServiceStatus) -> Iterator[Metric]:
        """Yield what a single server exports of its batches, under the same names."""
        model_name = self._fleet.served.name
        batches = GaugeMetricFamily(
            "coserve_batches", "Unfinished batches by state.", labels=["model_name", "state"]
        )
        for state in UNFINISHED:
            batches.add_metric([model_name, state], status.batches.get(state, 0))
        batches.add_metric([model_name, "paused"], status.paused_batches)
        yield batches
        for name, text, value in (
            ("batch_lines_waiting", "Lines that no engine has got yet.", status.lines_waiting),
            (
                "batch_required_tokens_per_second",
                "What all batches that are served need to be complete in their windows.",
                self._required_tokens_per_s,
            ),
        ):
            family = GaugeMetricFamily(f"coserve_{name}", text, labels=["model_name"])
            family.add_metric([model_name], value)
            yield family
