"""Many engines as one backend of the line engine."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from itertools import count
from typing import Final, Self

from msgspec.structs import replace

from sglang_coserve.errors import ConfigError, ServerError
from sglang_coserve.fleet.delays import FleetDelays
from sglang_coserve.fleet.engine import LINES_AHEAD, EngineState, RemoteEngine
from sglang_coserve.fleet.line_placement.failure_streak import FAILURES_IN_A_ROW
from sglang_coserve.fleet.line_placement.placement import (
    DEATHS_BEFORE_APART,
    LinePlacement,
    Placed,
)
from sglang_coserve.fleet.line_placement.served_model import served_model
from sglang_coserve.fleet.optional_parts import LINE_MOVES
from sglang_coserve.fleet.routed_engines import RoutedEngines
from sglang_coserve.fleet.served_model import ServedModel
from sglang_coserve.http_lines.http_engine import HttpEngine
from sglang_coserve.http_lines.messages import EngineDelays, EngineLostError, EngineRefusesError
from sglang_coserve.jsonl.body_limits import BodyLimits
from sglang_coserve.jsonl.request_line import asked_model, prefix_key
from sglang_coserve.lines.backend import (
    Backend,
    BackendLoad,
    ChangeListeners,
    LineMovedError,
    LineRequest,
    LineResult,
    MovedKv,
    TokenRate,
)
from sglang_coserve.lines.background import TaskSupervisor, backoff_s
from sglang_coserve.lines.result_record import error_message, usage_of

_LOOK_INTERVAL_S: Final = 0.5
"""How often an engine is asked how it stands. A window grows by ``LINES_AHEAD`` each time."""

_LOOKS_PER_S: Final = 100
"""Looks at all engines together: they take about a tenth of a core. More engines are asked less
often."""

_FIRST_PAUSE_S: Final = 0.1
_MOST_PAUSE_S: Final = 10.0
"""Pauses before a line is sent again whose connection broke without a token."""

_WATCH: Final = "engine_watch"
_DELAYS: Final = "online_delays"
"""Names of tasks."""

_NO_MORE: Final = "it is none of the fleet any more"

ENDS: Final = ("moved", "cut", "lost", "given_up", "pulled", "returned")
"""How attempts end without an answer: the engine gave the line back; the connection broke, and the
engine goes on; the engine died; the line was given up; with pools, a strict engine took the line
over, or had no room for it any more."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Attempt:
    """An attempt at a line in one engine."""

    engine: RemoteEngine
    run: str | None
    """The run of the engine that got the line."""

    request: LineRequest | None = None
    """The line as it was sent; None before."""

    limit: asyncio.Timeout | None = None
    """Ends the attempt once the engine has died without a word."""


@dataclass(slots=True, eq=False)
class _Line:
    """A line that is being served."""

    number: int
    request: LineRequest
    on_tokens: Callable[[Sequence[int]], None]
    model: str
    """The model of its tokens."""

    asked: str | None
    """The name of the model or adapter that it asks for; None if any engine will do."""

    generated: list[int]
    kv: MovedKv | None = None
    attempt: _Attempt | None = None
    """The attempt that is being made, or is to be made next; None while the line waits."""

    is_given_up: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when ``attempt`` or ``is_given_up`` is."""

    deaths: list[str] = field(default_factory=list)
    """What was said of engines that died with the line."""

    cuts: int = 0
    """Connections in a row that broke before they brought tokens."""

    async def next_attempt(self) -> _Attempt | None:
        """Wait for the next attempt; None if the line is given up."""
        while self.attempt is None and not self.is_given_up:
            self.changed.clear()
            await self.changed.wait()
        return self.attempt


class FleetBackend(Backend):
    """See ``Backend``. Lives on one event loop.

    The death of an engine is no attempt of a line: until the line is answered, or several engines
    have died of it, the line goes on where there is room. A context manager: leaving it ends all
    attempts.
    """

    def __init__(
        self,
        admin_key: str,
        *,
        routers: Iterable[RoutedEngines] = (),
        background: TaskSupervisor | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
        look_interval_s: float = _LOOK_INTERVAL_S,
    ) -> None:
        """Know no engine yet.

        Args:
            admin_key: The admin key of every engine.
            routers: What stands at the addresses of routers, in place of an engine.
            background: Runs what watches the engines.
            monotonic_s: The time, in seconds.
            look_interval_s: How often an engine is looked at.
        """
        self._admin_key = admin_key
        self._routers = {router.url: router for router in routers}
        self._background = background or TaskSupervisor()
        self._monotonic_s = monotonic_s
        self._look_interval_s = look_interval_s
        self._engines: dict[str, RemoteEngine] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._wanted: frozenset[str] = frozenset()
        self.left_out: dict[str, str] = {}
        """Addresses that cannot be used, and why."""

        self._placement = LinePlacement()
        self._moves = LINE_MOVES()
        self._lines: dict[int, _Line] = {}
        self._numbers = count()
        self._rng = random.Random()
        self._deaths: set[tuple[str, str | None]] = set()
        """Addresses and runs of engines that seem to have died, until they answer."""

        self._model: str | None = None
        self.served = ServedModel()
        """What engines of the model serve; while there are none, what they served last."""

        self._rate = TokenRate(monotonic_s)
        self._delays = FleetDelays()
        self._listeners = ChangeListeners()
        self._has_model = asyncio.Event()
        self.ends = dict.fromkeys(ENDS, 0)
        """Attempts by how they ended without an answer."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for watching in self._watching.values():
            watching.cancel()
        await asyncio.gather(*self._watching.values(), return_exceptions=True)
        for engine in self.engines:
            await engine.http.close()

    # --- the engines ---

    @property
    def engines(self) -> Collection[RemoteEngine]:
        """All engines that are known, also while they do not answer."""
        return self._engines.values()

    @property
    def lines_waiting(self) -> int:
        """Lines for which no engine has room."""
        return self._placement.num_waiting

    def lines_in(self, engine: RemoteEngine) -> int:
        """Return how many lines an engine has from here."""
        return self._placement.in_flight(engine.url)

    def set_engines(self, urls: Iterable[str]) -> None:
        """Say which engines there are.

        An engine that is not among them any more ends its lines, and gets no others. An address
        that cannot be used is left out, and logged once.
        """
        wanted = dict.fromkeys(urls)
        self._wanted = frozenset(wanted)
        for url in self._engines.keys() - self._wanted:
            self._close(self._engines[url], EngineState.DRAINING, _NO_MORE)
        left_out = {}
        for url in wanted:
            try:
                if url not in self._engines:
                    self._add(url)
            except (ConfigError, ValueError) as error:
                left_out[url] = str(error)
                if url not in self.left_out:
                    _log.error("an engine is left out: %s", error)
        self.left_out = left_out

    def _add(self, url: str) -> None:
        http = self._routers.get(url) or HttpEngine(url, self._admin_key)
        engine = RemoteEngine(http, self._monotonic_s)
        self._engines[url] = engine
        self._update_placement(engine)
        self._watching[url] = self._background.start(_WATCH, partial(self._watch, engine), url)

    async def ready(self) -> None:
        """Wait until some engine has said what it serves."""
        await self._has_model.wait()

    # --- as one backend ---

    @property
    def model(self) -> str:
        """See ``Backend.model``: the model of most engines."""
        return self._model or ""

    is_changing = False
    """Never: an engine whose model is being exchanged gives its lines to others."""

    async def settled(self) -> None:
        """See ``Backend.settled``: tokens are kept for a model, so one has to be known."""
        await self.ready()

    @property
    def stalled_by(self) -> str | None:
        """See ``Backend.stalled_by``."""
        if any(self._is_open(engine) for engine in self.engines):
            return None
        return "no engine takes lines now: the batch goes on when one does"

    def when_changing(self, take_out: Callable[[], None]) -> Callable[[], None]:
        """See ``Backend.when_changing``; also called when most engines have another model."""
        return self._listeners.add(take_out)

    @property
    def endpoints(self) -> frozenset[str]:
        """See ``Backend.endpoints``: the endpoints that every engine of the model serves."""
        return frozenset(self.served.endpoints)

    @property
    def model_names(self) -> tuple[str, ...]:
        """See ``Backend.model_names``: the names of all engines of the model."""
        return self.served.names

    @property
    def limits(self) -> BodyLimits:
        """See ``Backend.limits``: what every engine of the model takes."""
        return self.served.limits

    def load(self) -> BackendLoad:
        """See ``Backend.load``. The rate is the sum of the rates of the engines that are up."""
        up = [engine for engine in self.engines if self._is_open(engine)]
        rates = [rate for engine in up if (rate := engine.rate.per_s()) is not None]
        return BackendLoad(
            sum(rates) if rates else None,
            total_tokens=self._rate.total_tokens,
            # More lines than fit, among which each engine finds lines of its own prefixes.
            max_in_flight=max(1, sum(engine.window + LINES_AHEAD for engine in up)),
            num_engines=max(1, len(up)),
        )

    async def online_delays_s(self) -> Mapping[str, float] | None:
        """See ``Backend.online_delays_s``: of the engines that know."""
        there = [engine for engine in self.engines if engine.last_report is not None]
        answers = await asyncio.gather(
            *(engine.http.delays() for engine in there), return_exceptions=True
        )
        for engine, each in zip(there, answers, strict=True):
            if isinstance(each, EngineDelays):
                self._delays.add(engine.url, each)
            elif not isinstance(each, ServerError):  # A look tells of those.
                self._background.note_failure(_DELAYS, each, engine.url)
        self._delays.keep(self._engines.keys())
        return self._delays.sums_s()

    # --- a line ---

    async def run(
        self, request: LineRequest, on_tokens: Callable[[Sequence[int]], None]
    ) -> LineResult:
        """See ``Backend.run``."""
        number = next(self._numbers)
        asked = asked_model(request.body, self.model_names)
        line = _Line(number, request, on_tokens, self.model, asked, list(request.generated))
        self._lines[number] = line
        try:
            self._carry_out(self._placement.offer(number, prefix_key(request.body), asked))
            while (attempt := await line.next_attempt()) is not None:
                result = await self._try(line, attempt)
                if result is not None:
                    return result
            return self._given_up(line)
        finally:
            del self._lines[number]
            self._moves.end(number)
            if not line.is_given_up:
                self._carry_out(self._placement.end(number))

    async def _try(self, line: _Line, attempt: _Attempt) -> LineResult | None:
        """Make an attempt; return its result, or None once the line waits for another one."""
        number, engine = line.number, attempt.engine
        generated = tuple(line.generated)
        attempt.request = replace(line.request, generated=generated, kv=line.kv)
        self._moves.start(number, engine.url, len(generated), self._monotonic_s())
        placed: list[Placed] = []
        limit = asyncio.timeout(None)
        try:
            async with limit:
                attempt.limit = limit
                try:
                    return await self._run(line, attempt)
                finally:
                    attempt.limit = None
        except LineMovedError as error:
            # What an engine has left of a line is good until another one has taken it.
            line.kv = error.kv or line.kv
            placed = self._moved(line, attempt, str(error))
        except EngineRefusesError as error:
            self.ends["moved"] += 1
            self._close(engine, EngineState.REFUSING, str(error))
            placed = self._offer_again(line, attempt)
        except EngineLostError as error:
            placed = await self._lost(line, attempt, str(error))
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            self._moves.stop(number)
        self._carry_out(placed)
        return None

    async def _run(self, line: _Line, attempt: _Attempt) -> LineResult:
        engine, number, request = attempt.engine, line.number, attempt.request
        assert request is not None
        moves, num_received = self._moves, 0

        def receive(tokens: Sequence[int]) -> None:
            nonlocal num_received
            num_received += len(tokens)
            moves.add_tokens(number, len(tokens), self._monotonic_s())
            self._count_tokens(engine, len(tokens))
            line.generated.extend(tokens)
            line.cuts = 0
            if line.attempt is attempt:
                self._carry_out(self._placement.progressed(number))
            line.on_tokens(tokens)

        with engine.rate.in_flight(), self._rate.in_flight():
            result = await engine.http.run(
                request, line.model, receive, lambda tokens: moves.has_prompt(number, tokens)
            )
            if result.status_code == HTTPStatus.NOT_FOUND and line.asked is not None:
                # Another engine has the adapter: this one has unloaded it just now.
                raise LineMovedError(f"{engine.url} does not have {line.asked}")
            self._judge(engine, result)
            self._count_tokens(engine, max(0, usage_of(result.body).total_tokens - num_received))
        return result

    def _moved(self, line: _Line, attempt: _Attempt, why: str) -> list[Placed]:
        """Have a line that its engine gave back go on: in the engine that pulls it, or anywhere."""
        move = self._moves.move_of(line.number)
        if move is None:
            self.ends["moved"] += 1
            self._close(attempt.engine, EngineState.DRAINING, why)
        elif move.to is None:
            self.ends["returned"] += 1
        elif line.attempt is attempt:
            self.ends["pulled"] += 1
            line.attempt = None
            return self._placement.move(line.number, move.to)
        return self._offer_again(line, attempt)

    async def _lost(self, line: _Line, attempt: _Attempt, why: str) -> list[Placed]:
        """Find out what became of an engine with which the connection broke.

        If the same run of it answers, only the connection was lost: the line continues after its
        tokens. Otherwise the engine has died, with all lines in it; if it answers later after all,
        that is taken back (``_note_alive``).
        """
        engine = attempt.engine
        await self._look_at(engine)
        if line.attempt is not attempt:
            return []  # The engine's death was noted meanwhile, and the line waits again.
        if engine.run == attempt.run and engine.state is not EngineState.DOWN:
            self.ends["cut"] += 1
            line.cuts += 1
            # A proxy may cut every connection at once.
            await asyncio.sleep(backoff_s(line.cuts, _FIRST_PAUSE_S, _MOST_PAUSE_S, self._rng))
            return self._offer_again(line, attempt)
        self._died(engine, attempt.run, why)
        return []

    def _offer_again(self, line: _Line, attempt: _Attempt) -> list[Placed]:
        if line.attempt is not attempt:
            return []
        line.attempt = None
        return self._placement.offer_again(line.number)

    def _died(self, engine: RemoteEngine, run: str | None, why: str) -> None:
        """Have the lines of an engine that has died go on elsewhere."""
        lines = [
            line
            for line in self._lines.values()
            if line.attempt is not None and line.attempt.engine is engine
        ]
        now_s = asyncio.get_running_loop().time()
        for line in lines:
            assert line.attempt is not None
            if line.attempt.limit is not None:
                line.attempt.limit.reschedule(now_s)
            line.attempt = None
            line.deaths.append(why)
        self.ends["lost"] += len(lines)
        engine.lines_lost += len(lines)
        self._deaths.add((engine.url, run))
        self._close(engine, EngineState.DOWN, why)
        placed, given_up = self._placement.engine_died(engine.url, (engine.url, run))
        for number in given_up:
            line = self._lines[number]  # type: ignore[index]
            line.is_given_up = True
            line.changed.set()
        self._carry_out(placed)

    def _given_up(self, line: _Line) -> LineResult:
        self.ends["given_up"] += 1
        message = (
            f"engines ended while they served this line, the last one with no other line beside it;"
            f" it is not tried again ({'; '.join(line.deaths[-DEATHS_BEFORE_APART - 1 :])})"
        )
        _log.error("%s, line %d: %s", line.request.batch_id, line.request.line, message)
        return LineResult.unserved("engine_failed", message)

    def _judge(self, engine: RemoteEngine, result: LineResult) -> None:
        """Let an engine rest that fails on one line after the other."""
        if not result.is_retryable:
            engine.lines_served += 1
            engine.streak.succeeded()
            return
        now_s = self._monotonic_s()
        engine.streak.failed(now_s)
        if engine.streak.is_resting(now_s):
            reason = f"{FAILURES_IN_A_ROW} lines in a row failed: {error_message(result.body)}"
            self._close(engine, EngineState.FAILING, reason)

    def _count_tokens(self, engine: RemoteEngine, tokens: int) -> None:
        engine.rate.add(tokens)
        self._rate.add(tokens)

    def _carry_out(self, placed: Iterable[Placed]) -> None:
        for number, url in placed:
            line = self._lines[number]  # type: ignore[index]
            engine = self._engines[url]
            line.attempt = _Attempt(engine, engine.run)
            line.changed.set()

    # --- looking after engines ---

    def _close(self, engine: RemoteEngine, state: EngineState, reason: str) -> None:
        """Give an engine nothing until it was looked at again."""
        if engine.is_up:
            _log.warning("no more lines for %s: %s", engine.url, reason)
            engine.set_state(state, reason)
            self._update_placement(engine)

    async def _watch(self, engine: RemoteEngine) -> None:
        """Look at an engine again and again, until it is none of the fleet any more."""
        url = engine.url
        while url in self._wanted or self._placement.in_flight(url):
            await self._look_at(engine)
            await asyncio.sleep(max(self._look_interval_s, len(self._engines) / _LOOKS_PER_S))
        if self._engines.get(url) is engine:
            engine.set_state(EngineState.DOWN, _NO_MORE)
            self._update_placement(engine)
            self._placement.remove_engine(url)
            del self._engines[url], self._watching[url]
        await engine.http.close()

    async def _look_at(self, engine: RemoteEngine) -> None:
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
        self._note_alive(engine)
        if engine.is_dead and self._placement.in_flight(url):
            self._died(engine, engine.run, f"{url}: {engine.reason}")
        if url not in self._wanted and engine.is_up:
            engine.set_state(EngineState.DRAINING, _NO_MORE)
        self._choose_model()
        self._update_placement(engine)
        self._ask_back(engine)

    def _note_alive(self, engine: RemoteEngine) -> None:
        """Note that lines have not caused the death of an engine that goes on, or that an engine
        which was started again has died before."""
        if engine.state in (EngineState.DOWN, EngineState.STUCK, EngineState.REFUSING):
            return
        for death in [each for each in self._deaths if each[0] == engine.url]:
            self._deaths.remove(death)
            if death[1] == engine.run:
                self._carry_out(self._placement.withdraw(death))

    def _update_placement(self, engine: RemoteEngine) -> None:
        changed = self._moves.set_engine(engine.url, engine.pool, is_open=self._is_open(engine))
        for url, begins_lines in changed.items():
            known = self._engines[url]
            self._carry_out(
                self._placement.set_engine(
                    url, window=known.window, is_open=begins_lines, models=known.models
                )
            )

    def _ask_back(self, engine: RemoteEngine) -> None:
        """Ask for the lines that an engine is to take over, or to give back."""
        report = engine.last_report
        if report is None or not self._is_open(engine):
            return
        now_s = self._monotonic_s()
        for number, _ in self._moves.look(engine.url, report.wants, report.waiting, now_s):
            attempt = self._lines[number].attempt  # type: ignore[index]
            if attempt is not None and attempt.request is not None:
                attempt.engine.http.hand_back(attempt.request)

    def _is_open(self, engine: RemoteEngine) -> bool:
        return engine.is_up and engine.model == self._model

    def _choose_model(self) -> None:
        """Serve the model of most engines; what others have of another one is worth nothing."""
        listed = [engine for engine in self.engines if engine.url in self._wanted]
        model = served_model([engine.model for engine in listed], self._model)
        if model is None:
            return
        has_changed, self._model = model != self._model, model
        reports = [e.last_report for e in listed if e.last_report and e.model == model]
        if reports:
            names = dict.fromkeys(name for report in reports for name in report.models)
            endpoints = frozenset.intersection(*(frozenset(one.endpoints) for one in reports))
            limits = _least([report.limits for report in reports])
            self.served = ServedModel(tuple(names), tuple(sorted(endpoints)), limits)
        if has_changed:
            _log.warning("%d of %d engines have the model %s", len(reports), len(listed), model)
            for engine in self.engines:
                self._update_placement(engine)
            self._has_model.set()
            self._listeners.tell()


def _least(limits: Sequence[BodyLimits]) -> BodyLimits:
    names = BodyLimits.__dataclass_fields__
    return BodyLimits(**{name: min(getattr(limit, name) for limit in limits) for name in names})
