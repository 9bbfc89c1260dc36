"""Many engines as one backend of the line engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Final, Self

from msgspec.structs import replace

from sglang_coserve.errors import ConfigError, ServerError
from sglang_coserve.fleet.engine import EngineState, FleetDelays, RemoteEngine
from sglang_coserve.fleet.line_placement.engines import (
    FAILURES_IN_A_ROW,
    LINES_AHEAD,
    model_of_most,
)
from sglang_coserve.fleet.line_placement.line_moves import Move
from sglang_coserve.fleet.line_placement.placement import LinePlacement, Placed
from sglang_coserve.fleet.optional_parts import LINE_MOVES
from sglang_coserve.fleet.served_model import ServedModel
from sglang_coserve.http_lines.engine_connection import EngineConnection
from sglang_coserve.http_lines.messages import (
    EngineDelays,
    EngineLostError,
    EngineRefusesError,
)
from sglang_coserve.jsonl.body_limits import BodyLimits
from sglang_coserve.jsonl.request_line import prefix_key
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
from sglang_coserve.lines.background import TaskSupervisor
from sglang_coserve.lines.result_record import error_message, usage_of

_LOOK_INTERVAL_S: Final = 0.5
"""How often an engine's load is asked for. A window grows by ``LINES_AHEAD`` each time."""

_LOOKS_PER_S: Final = 100
"""Of all engines together: takes about a tenth of a core. More engines are asked less often."""

_WATCH: Final = "engine_watch"
_DELAYS: Final = "online_delays"
"""Names of tasks."""

_NO_MORE: Final = "it is none of the fleet any more"

ENDS: Final = ("moved", "pulled", "returned", "lost", "given_up")
"""Of attempts at lines that go on elsewhere, but for the last: without a loss; taken over by strict
engines from relaxed ones; asked back, as strict engines had no room any more; with their engine."""

_log = logging.getLogger(__name__)


class FleetBackend(Backend):
    """See ``Backend``. Lives on one event loop.

    The death of an engine is not an attempt of a line: until it is answered, or several engines
    have died with it, the line goes on where there is room. A context manager: leaving it ends
    all attempts.
    """

    def __init__(
        self,
        admin_key: str,
        *,
        background: TaskSupervisor | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
        look_interval_s: float = _LOOK_INTERVAL_S,
    ) -> None:
        """``admin_key`` is that of every engine; ``background`` runs what watches them."""
        self._admin_key = admin_key
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
        self._attempts: dict[int, tuple[RemoteEngine, LineRequest]] = {}
        """That are being made, of each line."""

        self._turns: dict[int, asyncio.Future[RemoteEngine]] = {}
        """For each line that is being served, the engine that is to have it next."""

        self._numbers = count()
        self._model: str | None = None
        self.served = ServedModel()
        """By the engines of the model; while there are none, as it was when there were."""

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
            await engine.connection.close()

    @property
    def engines(self) -> Collection[RemoteEngine]:
        """All that are known, the ones that do not answer among them."""
        return self._engines.values()

    @property
    def lines_waiting(self) -> int:
        """Lines for which no engine has room."""
        return self._placement.num_waiting

    def lines_in(self, engine: RemoteEngine) -> int:
        """Return how many lines an engine has from here."""
        return self._placement.in_flight(engine.url)

    def set_engines(self, urls: Iterable[str]) -> None:
        """Say which engines there are. One that is no more gets nothing new; what it has it ends.

        An address that cannot be used is left out, and logged as long as it was not before.
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
        engine = RemoteEngine(EngineConnection(url, self._admin_key), self._monotonic_s)
        self._engines[url] = engine
        self._update_placement(engine)
        self._watching[url] = self._background.start(_WATCH, partial(self._watch, engine), url)

    async def ready(self) -> None:
        """Wait until some engine has said what it serves."""
        await self._has_model.wait()

    @property
    def model(self) -> str:
        """See ``Backend.model``: that of most engines."""
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
        """See ``Backend.endpoints``: those that every engine of the model serves."""
        return frozenset(self.served.endpoints)

    @property
    def model_names(self) -> tuple[str, ...]:
        """See ``Backend.model_names``: those of all engines of the model."""
        return self.served.names

    @property
    def limits(self) -> BodyLimits:
        """See ``Backend.limits``: what every engine of the model takes."""
        return self.served.limits

    def load(self) -> BackendLoad:
        """See ``Backend.load``. The rate is the sum of the engines' that are up."""
        up = [engine for engine in self.engines if self._is_open(engine)]
        rates = [rate for engine in up if (rate := engine.rate.per_s()) is not None]
        return BackendLoad(
            sum(rates) if rates else None,
            total_tokens=self._rate.total_tokens,
            # Some lines more than fit, of which each engine finds those that are its own.
            max_in_flight=max(1, sum(engine.window + LINES_AHEAD for engine in up)),
            num_engines=max(1, len(up)),
        )

    async def online_delays_s(self) -> Mapping[str, float] | None:
        """See ``Backend.online_delays_s``: of the engines that know."""
        there = [engine for engine in self.engines if engine.description is not None]
        answers = await asyncio.gather(
            *(engine.connection.delays() for engine in there), return_exceptions=True
        )
        for engine, each in zip(there, answers, strict=True):
            if isinstance(each, EngineDelays):
                self._delays.add(engine.url, each)
            elif not isinstance(each, ServerError):  # Those are told by ``look``.
                self._background.note_failure(_DELAYS, each, engine.url)
        self._delays.keep(self._engines.keys())
        return self._delays.sums_s()

    async def run(
        self, request: LineRequest, on_tokens: Callable[[Sequence[int]], None]
    ) -> LineResult:
        """See ``Backend.run``."""
        model, generated = self.model, list(request.generated)
        number = next(self._numbers)
        new_turn = asyncio.get_running_loop().create_future
        self._turns[number] = new_turn()
        is_known = True
        deaths: list[str] = []
        kv: MovedKv | None = None
        try:
            self._carry_out(self._placement.offer(number, prefix_key(request.body)))
            while True:
                engine = await self._turns[number]
                self._turns[number] = new_turn()
                attempt = replace(request, generated=tuple(generated), kv=kv)
                move: Move | None = None
                has_died = False
                self._attempts[number] = (engine, attempt)
                self._moves.start(number, engine.url, len(generated), self._monotonic_s())
                try:
                    return await self._attempt(number, model, generated, on_tokens)
                except LineMovedError as error:
                    # What an engine has left is good until another one has taken it.
                    kv = error.kv or kv
                    move = self._moves.move_of(number)
                    if move is None:
                        self.ends["moved"] += 1
                        self._close(engine, EngineState.DRAINING, str(error))
                except EngineRefusesError as error:
                    self.ends["moved"] += 1
                    self._close(engine, EngineState.REFUSING, str(error))
                except EngineLostError as error:
                    has_died = error.had_the_line
                    self.ends["lost"] += has_died
                    engine.lines_lost += has_died
                    if has_died:
                        deaths.append(str(error))
                    self._close(engine, EngineState.DOWN, str(error))
                finally:
                    del self._attempts[number]
                    self._moves.stop(number)
                placed = self._place_again(number, move, engine_died=has_died)
                if placed is None:
                    is_known = False
                    self.ends["given_up"] += 1
                    message = f"{len(deaths)} engines ended while they served this line, the last"
                    message += f" one alone; it is not tried again ({'; '.join(deaths)})"
                    _log.error("%s, line %d: %s", request.batch_id, request.line, message)
                    return LineResult.unserved("engine_failed", message)
                self._carry_out(placed)
        finally:
            del self._turns[number]
            self._moves.end(number)
            if is_known:
                self._carry_out(self._placement.end(number))

    def _place_again(
        self, number: int, move: Move | None, *, engine_died: bool
    ) -> list[Placed] | None:
        if move is not None and move.to is not None:
            self.ends["pulled"] += 1
            return self._placement.move(number, move.to)
        self.ends["returned"] += move is not None
        return self._placement.offer_again(number, engine_died=engine_died)

    async def _attempt(
        self,
        number: int,
        model: str,
        generated: list[int],
        on_tokens: Callable[[Sequence[int]], None],
    ) -> LineResult:
        engine, request = self._attempts[number]
        moves, num_received = self._moves, 0

        def receive(tokens: Sequence[int]) -> None:
            nonlocal num_received
            num_received += len(tokens)
            moves.add_tokens(number, len(tokens), self._monotonic_s())
            self._count_tokens(engine, len(tokens))
            generated.extend(tokens)
            on_tokens(tokens)

        with engine.rate.in_flight(), self._rate.in_flight():
            result = await engine.connection.run(
                request, model, receive, lambda tokens: moves.has_prompt(number, tokens)
            )
            self._judge(engine, result)
            self._count_tokens(engine, max(0, usage_of(result.body).total_tokens - num_received))
        return result

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
            assert isinstance(number, int)
            turn = self._turns[number]
            if not turn.done():  # Nobody waits for it who is being cancelled.
                turn.set_result(self._engines[url])

    def _close(self, engine: RemoteEngine, state: EngineState, reason: str) -> None:
        """Give an engine nothing until it was looked at again."""
        if engine.state is EngineState.UP:
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
        await engine.connection.close()

    async def _look_at(self, engine: RemoteEngine) -> None:
        url, before = engine.url, engine.state
        try:
            await engine.look(self._placement.in_flight(url))
        except Exception as error:
            engine.set_state(EngineState.DOWN, repr(error))
            self._background.note_failure(_WATCH, error, url)
        if url not in self._wanted:
            engine.set_state(EngineState.DRAINING, _NO_MORE)
        if engine.state is not before:
            reason = f": {engine.reason}" if engine.reason else ""
            _log.warning("%s is %s%s", url, engine.state.value, reason)
        self._choose_model()
        self._update_placement(engine)
        self._ask_back(engine)

    def _update_placement(self, engine: RemoteEngine) -> None:
        changed = self._moves.set_engine(engine.url, engine.pool, is_open=self._is_open(engine))
        for url, begins_lines in changed.items():
            window = self._engines[url].window
            self._carry_out(self._placement.set_engine(url, window=window, is_open=begins_lines))

    def _ask_back(self, engine: RemoteEngine) -> None:
        """Ask for the lines that an engine is to take over, or to give back."""
        load = engine.load
        if load is None or not self._is_open(engine):
            return
        now_s = self._monotonic_s()
        for line, _ in self._moves.look(engine.url, load.wants, load.offline.waiting, now_s):
            assert isinstance(line, int)
            has_it, attempt = self._attempts[line]
            has_it.connection.ask_back(attempt)

    def _is_open(self, engine: RemoteEngine) -> bool:
        return engine.model is not None and engine.model == self._model

    def _choose_model(self) -> None:
        """Serve the model of most engines; what others have of another one is worth nothing."""
        models = [engine.model for engine in self.engines if engine.model is not None]
        model = model_of_most(models, self._model)
        if model is None:
            return
        has_changed, self._model = model != self._model, model
        serving = [engine for engine in self.engines if self._is_open(engine)]
        described = [engine.description for engine in serving if engine.description]
        if described:
            endpoints = frozenset.intersection(*(frozenset(d.endpoints) for d in described))
            names = dict.fromkeys(name for engine in serving for name in engine.model_names)
            limits = _least([d.limits for d in described])
            self.served = ServedModel(tuple(names), tuple(sorted(endpoints)), limits)
        if has_changed:
            _log.warning("%d of %d engines serve the model %s", len(described), len(models), model)
            for engine in self.engines:
                self._update_placement(engine)
            self._has_model.set()
            self._listeners.tell()


def _least(limits: Sequence[BodyLimits]) -> BodyLimits:
    names = BodyLimits.__dataclass_fields__
    return BodyLimits(**{name: min(getattr(limit, name) for limit in limits) for name in names})
