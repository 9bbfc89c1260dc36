"""The engines of a fleet: which there are, how each stands, and which model they serve."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, Protocol

from sglang_coserve.errors import ConfigError
from sglang_coserve.fleet.engine import EngineState, RemoteEngine
from sglang_coserve.fleet.line_placement.model_vote import served_model
from sglang_coserve.fleet.routed_engines import RoutedEngines
from sglang_coserve.fleet.served_model import ServedModel
from sglang_coserve.http_lines.http_engine import HttpEngine
from sglang_coserve.jsonl.body_limits import BodyLimits
from sglang_coserve.lines.background import TaskSupervisor

LOOK_INTERVAL_S: Final = 0.5
"""Interval at which an engine is asked how it stands. A window grows by ``LINES_AHEAD`` each
time."""

_LOOKS_PER_S: Final = 100
"""Looks at all engines together: they take about a tenth of a core. More engines are asked less
often."""

_WATCH: Final = "engine_watch"
"""The name of the task that watches an engine."""

_NO_MORE: Final = "it is none of the fleet any more"

_log = logging.getLogger(__name__)


class EngineObserver(Protocol):
    """The part of a fleet that sends lines to the engines."""

    def has_lines(self, engine: RemoteEngine) -> bool:
        """Return whether an engine has lines, so that it is watched although it has left."""

    def looked_at(self, engine: RemoteEngine) -> None:
        """Note how an engine stands, which was asked just now."""

    def changed(self, engine: RemoteEngine) -> None:
        """Note that an engine may take more or fewer lines than before."""

    def hand_over(self, engine: RemoteEngine) -> None:
        """Let an engine take lines over, or give lines back, as it wants to."""

    def left(self, engine: RemoteEngine) -> None:
        """Forget an engine that has no line any more."""

    def names_changed(self) -> None:
        """Note that lines may ask for other models or adapters than before."""

    def model_changed(self) -> None:
        """Note that the fleet serves another model."""


class FleetEngines:
    """Asks engines how they stand, again and again. Lives on one event loop."""

    def __init__(
        self,
        observer: EngineObserver,
        admin_key: str,
        *,
        routers: Iterable[RoutedEngines] = (),
        background: TaskSupervisor,
        monotonic_s: Callable[[], float] = time.monotonic,
        look_interval_s: float = LOOK_INTERVAL_S,
    ) -> None:
        """Know no engine yet.

        Args:
            observer: Hears of changes.
            admin_key: The admin key of every engine.
            routers: What stands at the addresses of routers, in place of an engine.
            background: Runs what watches the engines.
            monotonic_s: The time, in seconds.
            look_interval_s: The interval at which an engine is looked at, in seconds.
        """
        self._observer = observer
        self._admin_key = admin_key
        self._routers = {router.url: router for router in routers}
        self._background = background
        self._monotonic_s = monotonic_s
        self._look_interval_s = look_interval_s
        self._engines: dict[str, RemoteEngine] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._listed: frozenset[str] = frozenset()
        self._has_model = asyncio.Event()
        self.left_out: dict[str, str] = {}
        """Addresses that cannot be used, and why."""

        self.model: str | None = None
        """The model of most listed engines; None before the first."""

        self.served = ServedModel()
        """Names, endpoints and limits of the engines of the model; without any, the last known."""

    async def close(self) -> None:
        """End all watches and connections."""
        for watching in self._watching.values():
            watching.cancel()
        await asyncio.gather(*self._watching.values(), return_exceptions=True)
        for engine in self:
            await engine.http.close()

    async def ready(self) -> None:
        """Wait until some engine has said what it serves."""
        await self._has_model.wait()

    def __iter__(self) -> Iterator[RemoteEngine]:
        """Yield all engines that are known, also while they do not answer."""
        return iter(list(self._engines.values()))

    def __getitem__(self, url: str) -> RemoteEngine:
        return self._engines[url]

    def is_open(self, engine: RemoteEngine) -> bool:
        """Return whether an engine takes lines of the fleet's model."""
        return engine.is_up and engine.model == self.model

    def set_listed(self, urls: Iterable[str]) -> None:
        """Say which engines there are.

        An engine that is not among them any more ends its lines, and gets no others. An address
        that cannot be used is left out, and logged once.
        """
        listed = dict.fromkeys(urls)
        self._listed = frozenset(listed)
        for url in self._engines.keys() - self._listed:
            self.stop_lines(self._engines[url], EngineState.DRAINING, _NO_MORE)
        left_out = {}
        for url in listed:
            try:
                if url not in self._engines:
                    self._add(url)
            except (ConfigError, ValueError) as error:
                left_out[url] = str(error)
                if url not in self.left_out:
                    _log.error("an engine is left out: %s", error)
        self.left_out = left_out

    def stop_lines(self, engine: RemoteEngine, state: EngineState, reason: str) -> None:
        """Give an engine nothing until it was looked at again."""
        if engine.is_up:
            engine.set_state(state, reason)
            _log.warning("no more lines for %s: %s", engine.url, engine.reason)
            self._observer.changed(engine)

    async def look_at(self, engine: RemoteEngine) -> None:
        """Ask an engine how it stands, and tell the observer."""
        url, before = engine.url, engine.state
        try:
            if not await engine.look():
                return
        except Exception as error:
            engine.set_state(EngineState.DOWN, repr(error))
            self._background.note_failure(_WATCH, error, url)
        if engine.state is not before:
            reason = f": {engine.reason}" if engine.reason else ""
            _log.warning("%s is %s%s", url, engine.state.value, reason)
        if self._engines.get(url) is not engine:
            return  # It was forgotten meanwhile.
        self._observer.looked_at(engine)
        if url not in self._listed and engine.is_up:
            engine.set_state(EngineState.DRAINING, _NO_MORE)
        self._choose_model()
        self._observer.changed(engine)
        self._observer.hand_over(engine)

    def _add(self, url: str) -> None:
        http = self._routers.get(url) or HttpEngine(url, self._admin_key)
        engine = RemoteEngine(http, self._monotonic_s)
        self._engines[url] = engine
        self._observer.changed(engine)
        self._watching[url] = self._background.start(_WATCH, partial(self._watch, engine), url)

    async def _watch(self, engine: RemoteEngine) -> None:
        """Look at an engine again and again, until it is none of the fleet any more."""
        url = engine.url
        while url in self._listed or self._observer.has_lines(engine):
            await self.look_at(engine)
            await asyncio.sleep(max(self._look_interval_s, len(self._engines) / _LOOKS_PER_S))
        if self._engines.get(url) is engine:
            engine.set_state(EngineState.DOWN, _NO_MORE)
            self._observer.changed(engine)
            del self._engines[url], self._watching[url]
            self._observer.left(engine)
        await engine.http.close()

    def _choose_model(self) -> None:
        """Serve the model of most engines; what others have of another one is worth nothing."""
        listed = [engine for engine in self if engine.url in self._listed]
        model = served_model([engine.model for engine in listed], self.model)
        if model is None:
            return
        has_changed, self.model = model != self.model, model
        reports = [e.last_report for e in listed if e.last_report and e.model == model]
        if reports:
            names = dict.fromkeys(name for report in reports for name in report.models)
            endpoints = frozenset.intersection(*(frozenset(one.endpoints) for one in reports))
            limits = _least([report.limits for report in reports])
            before = self.served.names
            self.served = ServedModel(tuple(names), tuple(sorted(endpoints)), limits)
            if self.served.names != before:
                self._observer.names_changed()
        if has_changed:
            _log.warning("%d of %d engines have the model %s", len(reports), len(listed), model)
            for engine in self:
                self._observer.changed(engine)
            self._has_model.set()
            self._observer.model_changed()


def _least(limits: Sequence[BodyLimits]) -> BodyLimits:
    names = BodyLimits.__dataclass_fields__
    return BodyLimits(**{name: min(getattr(limit, name) for limit in limits) for name in names})
