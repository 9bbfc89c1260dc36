"""Many engines as one backend of the line engine."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from itertools import count
from typing import Final, Self

from msgspec.structs import replace

from sglang_coserve.errors import ServerError
from sglang_coserve.fleet.delays import FleetDelays
from sglang_coserve.fleet.engine import LINES_AHEAD, EngineState, RemoteEngine
from sglang_coserve.fleet.fleet_engines import LOOK_INTERVAL_S, EngineObserver, FleetEngines
from sglang_coserve.fleet.fleet_line import Attempt, FleetLine
from sglang_coserve.fleet.line_placement.failure_streak import FAILURES_IN_A_ROW
from sglang_coserve.fleet.line_placement.line_moves import Move
from sglang_coserve.fleet.line_placement.placement import (
    DEATHS_BEFORE_APART,
    LinePlacement,
    Placed,
)
from sglang_coserve.fleet.optional_parts import LINE_MOVES
from sglang_coserve.fleet.routed_engines import RoutedEngines
from sglang_coserve.http_lines.http_engine import AttemptListener
from sglang_coserve.http_lines.messages import EngineDelays, EngineLostError, EngineRefusesError
from sglang_coserve.jsonl.body_limits import BodyLimits
from sglang_coserve.jsonl.request_line import not_served, prefix_key
from sglang_coserve.lines.backend import (
    Backend,
    BackendLoad,
    ChangeListeners,
    FailureKind,
    LineMovedError,
    LineRequest,
    LineResult,
    TokenRate,
)
from sglang_coserve.lines.background import TaskSupervisor, backoff_s
from sglang_coserve.lines.result_record import error_code, error_message, usage_of
from sglang_coserve.network import raised_open_files

_FIRST_PAUSE_S: Final = 0.1
_MOST_PAUSE_S: Final = 10.0
"""Pauses before a line is sent again that was sent in vain."""

_MOST_SETBACKS: Final = 8
"""Attempts in a row without a token or an answer, which take some 20 s with their pauses."""

_OTHER_FILES: Final = 256
"""Open files beside the connections of lines: clients, the data directory, looks at engines."""

_DELAYS: Final = "online_delays"
_HAND_BACK: Final = "hand_back"
"""Names of tasks."""

ENDS: Final = ("moved", "cut", "lost", "given_up", "pulled", "returned")
"""How attempts end without an answer: the engine gave the line back; the connection broke, and the
engine goes on; the engine died; the line was given up; with pools, a strict engine took the line
over, or had no room for it any more."""

_log = logging.getLogger(__name__)


class _Listener(AttemptListener):
    """Tells the fleet of an attempt."""

    def __init__(self, fleet: FleetBackend, line: FleetLine, attempt: Attempt) -> None:
        self._fleet = fleet
        self._line = line
        self._attempt = attempt
        self.num_tokens = 0

    def began(self, run: str) -> None:
        self._attempt.run = run
        if self._line.attempt is self._attempt:
            self._fleet.placement.began(self._line.number)

    def has_prompt(self, tokens: int) -> None:
        self._fleet.moves.has_prompt(self._line.number, tokens)

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        self.num_tokens += len(token_ids)
        self._fleet.add_tokens(self._line, self._attempt, token_ids)


class FleetBackend(Backend, EngineObserver):
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
        look_interval_s: float = LOOK_INTERVAL_S,
    ) -> None:
        """Know no engine yet.

        Args:
            admin_key: The admin key of every engine.
            routers: What stands at the addresses of routers, in place of an engine.
            background: Runs what watches the engines.
            monotonic_s: The time, in seconds.
            look_interval_s: How often an engine is looked at.
        """
        self._background = background or TaskSupervisor()
        self._monotonic_s = monotonic_s
        self.engines = FleetEngines(
            self,
            admin_key,
            routers=routers,
            background=self._background,
            monotonic_s=monotonic_s,
            look_interval_s=look_interval_s,
        )
        self.placement = LinePlacement()
        self.moves = LINE_MOVES()
        self._lines: dict[int, FleetLine] = {}
        self._numbers = count()
        self._rng = random.Random()
        self._deaths: set[tuple[str, str]] = set()
        """Addresses and runs of engines that seem to have died, until that is sure."""

        self._most_lines = raised_open_files() - _OTHER_FILES
        """Each line in flight has a connection of its own."""

        self._rate = TokenRate(monotonic_s)
        self._delays = FleetDelays()
        self._listeners = ChangeListeners()
        self.ends = dict.fromkeys(ENDS, 0)
        """Attempts by how they ended without an answer."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.engines.close()

    # --- as one backend ---

    @property
    def lines_waiting(self) -> int:
        """Lines for which no engine has room."""
        return self.placement.num_waiting

    def lines_in(self, engine: RemoteEngine) -> int:
        """Return how many lines an engine has from here."""
        return self.placement.in_flight(engine.url)

    @property
    def model(self) -> str:
        """See ``Backend.model``: the model of most engines."""
        return self.engines.model or ""

    is_changing = False
    """Never: an engine whose model is being exchanged gives its lines to others."""

    async def settled(self) -> None:
        """See ``Backend.settled``: tokens are kept for a model, so one has to be known."""
        await self.engines.ready()

    @property
    def stalled_by(self) -> str | None:
        """See ``Backend.stalled_by``."""
        if any(self.engines.is_open(engine) for engine in self.engines):
            return None
        return "no engine takes lines now: the batch goes on when one does"

    def when_changing(self, take_out: Callable[[], None]) -> Callable[[], None]:
        """See ``Backend.when_changing``; also called when most engines have another model."""
        return self._listeners.add(take_out)

    @property
    def endpoints(self) -> frozenset[str]:
        """See ``Backend.endpoints``: the endpoints that every engine of the model serves."""
        return frozenset(self.engines.served.endpoints)

    @property
    def model_names(self) -> tuple[str, ...]:
        """See ``Backend.model_names``: the names of all engines of the model."""
        return self.engines.served.names

    @property
    def limits(self) -> BodyLimits:
        """See ``Backend.limits``: what every engine of the model takes."""
        return self.engines.served.limits

    def load(self) -> BackendLoad:
        """See ``Backend.load``. The rate is the sum of the rates of the engines that are up."""
        up = [engine for engine in self.engines if self.engines.is_open(engine)]
        rates = [rate for engine in up if (rate := engine.rate.per_s()) is not None]
        return BackendLoad(
            sum(rates) if rates else None,
            total_tokens=self._rate.total_tokens,
            # More lines than fit, among which each engine finds lines of its own prefixes.
            max_in_flight=max(
                1, min(self._most_lines, sum(engine.window + LINES_AHEAD for engine in up))
            ),
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
        self._delays.keep([engine.url for engine in self.engines])
        return self._delays.sums_s()

    # --- a line ---

    async def run(
        self, request: LineRequest, on_tokens: Callable[[Sequence[int]], None]
    ) -> LineResult:
        """See ``Backend.run``."""
        number = next(self._numbers)
        asked = self.engines.served.asked_by(request.body)
        line = FleetLine(number, request, on_tokens, self.model, asked, list(request.generated))
        self._lines[number] = line
        try:
            self._carry_out(self.placement.offer(number, prefix_key(request.body), asked))
            while (attempt := await line.next_attempt()) is not None:
                result = await self._try(line, attempt)
                if result is not None:
                    return result
            assert line.verdict is not None
            return line.verdict
        finally:
            del self._lines[number]
            self.moves.end(number)
            if line.verdict is None:
                self._carry_out(self.placement.end(number))

    async def _try(self, line: FleetLine, attempt: Attempt) -> LineResult | None:
        """Make an attempt; return its result, or None once the line waits for another one."""
        number, engine = line.number, attempt.engine
        generated = tuple(line.generated)
        request = replace(line.request, generated=generated, kv=line.kv, attempt=attempt.name)
        self.moves.start(number, engine.url, len(generated), self._monotonic_s())
        line.setbacks += 1
        limit, move = asyncio.timeout(None), None
        try:
            async with limit:
                attempt.limit = limit
                try:
                    return await self._run(line, attempt, request)
                finally:
                    attempt.limit = None
        except TimeoutError:
            if not limit.expired():
                raise
            return None
        except (LineMovedError, EngineRefusesError, EngineLostError) as error:
            failure = error
        finally:
            move = self.moves.move_of(number)
            self.moves.stop(number)
        return await self._go_on(line, attempt, failure, move)

    async def _go_on(
        self, line: FleetLine, attempt: Attempt, failure: ServerError, move: Move | None
    ) -> LineResult | None:
        """Have a line go on after an attempt that has brought no answer; as ``_try``."""
        engine, why = attempt.engine, str(failure)
        match failure:
            case LineMovedError():
                # What an engine has left of a line is good until another one has taken it.
                line.kv = failure.kv or line.kv
                return await self._moved(line, attempt, why, move)
            case EngineLostError():
                return await self._lost(line, attempt, why)
        self.ends["moved"] += 1
        if engine.is_up:
            engine.streak.rest(self._monotonic_s())
        self.engines.stop_lines(engine, EngineState.FAILING, why)
        return await self._offer_again(line, attempt, why)

    async def _run(
        self, line: FleetLine, attempt: Attempt, request: LineRequest
    ) -> LineResult | None:
        engine, listener = attempt.engine, _Listener(self, line, attempt)
        with engine.rate.in_flight(), self._rate.in_flight():
            result = await engine.http.run(request, line.model, listener)
            tokens = usage_of(result.body).total_tokens - listener.num_tokens
            self._count_tokens(engine, max(0, tokens))
        if self._may_be_elsewhere(line, engine, result):
            await self.engines.look_at(engine)
            # Where the engine still says that it has the adapter, the answer is final.
            if line.asked not in engine.models:
                return await self._offer_again(line, attempt, f"{engine.url} has no {line.asked}")
        self._judge(engine, result)
        return result

    def add_tokens(self, line: FleetLine, attempt: Attempt, token_ids: Sequence[int]) -> None:
        """Take tokens of a line that its engine has generated."""
        self.moves.add_tokens(line.number, len(token_ids), self._monotonic_s())
        self._count_tokens(attempt.engine, len(token_ids))
        line.generated.extend(token_ids)
        line.setbacks = 0
        if line.attempt is attempt:
            self._carry_out(self.placement.add_tokens(line.number, len(token_ids)))
        line.on_tokens(token_ids)

    def _may_be_elsewhere(self, line: FleetLine, engine: RemoteEngine, result: LineResult) -> bool:
        """Return whether the engine has unloaded the adapter that a line asks for."""
        if result.status_code != HTTPStatus.NOT_FOUND or line.asked in engine.models[:1]:
            return False
        return line.asked is not None and error_code(result.body) == "model_not_found"

    async def _moved(
        self, line: FleetLine, attempt: Attempt, why: str, move: Move | None
    ) -> LineResult | None:
        """Have a line that its engine gave back go on: in the engine that pulls it, or anywhere."""
        engine = attempt.engine
        if move is None:
            self.ends["moved"] += 1
            self.engines.stop_lines(engine, EngineState.DRAINING, why)
        elif move.to is None:
            self.ends["returned"] += 1
        elif line.attempt is attempt:
            self.ends["pulled"] += 1
            line.attempt = None
            self._carry_out(self.placement.move(line.number, move.to))
            return None
        return await self._offer_again(line, attempt, why, is_fault=False)

    async def _lost(self, line: FleetLine, attempt: Attempt, why: str) -> LineResult | None:
        """Find out what became of an engine with which the connection broke.

        If the same run of it answers, or the engine never had the line, the line continues after
        its tokens. Otherwise the engine seems to have died, with all lines in that run.
        """
        engine = attempt.engine
        await self.engines.look_at(engine)
        if line.attempt is attempt and attempt.run is not None and not engine.answers:
            self._died(engine, attempt.run, why)
        if line.attempt is attempt:
            self.ends["cut"] += 1
            return await self._offer_again(line, attempt, why)
        return None

    async def _offer_again(
        self, line: FleetLine, attempt: Attempt, why: str, *, is_fault: bool = True
    ) -> LineResult | None:
        """Have a line wait again, after a pause that grows with its setbacks.

        A line with many setbacks ends as a failed attempt of its own: whoever keeps it counts
        them. ``is_fault`` is False if neither the engine nor the line is at fault.
        """
        if is_fault and line.setbacks >= _MOST_SETBACKS:
            return LineResult.unserved("connection_lost", why, FailureKind.LOST)
        if is_fault or line.setbacks > 1:
            pause_s = backoff_s(line.setbacks, _FIRST_PAUSE_S, _MOST_PAUSE_S, self._rng)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    while line.attempt is attempt and line.verdict is None:
                        line.changed.clear()
                        await line.changed.wait()
        if line.attempt is attempt:
            if line.asked not in (None, *self.engines.served.names):
                return self._not_served(line)
            line.attempt = None
            self._carry_out(self.placement.offer_again(line.number))
        return None

    def _judge(self, engine: RemoteEngine, result: LineResult) -> None:
        """Let an engine rest that fails on one line after the other."""
        if not result.is_retryable:
            engine.lines_served += 1
            engine.streak.succeeded()
            return
        if result.kind is not FailureKind.FAILED:
            return
        now_s = self._monotonic_s()
        engine.streak.failed(now_s)
        if engine.streak.is_resting(now_s):
            reason = f"{FAILURES_IN_A_ROW} lines in a row failed: {error_message(result.body)}"
            self.engines.stop_lines(engine, EngineState.FAILING, reason)

    def _count_tokens(self, engine: RemoteEngine, tokens: int) -> None:
        engine.rate.add(tokens)
        self._rate.add(tokens)

    def _carry_out(self, placed: Iterable[Placed]) -> None:
        for number, url in placed:
            line = self._lines[number]  # type: ignore[index]
            line.attempt = Attempt(self.engines[url])
            line.changed.set()

    # --- deaths of engines ---

    def _died(self, engine: RemoteEngine, run: str, why: str) -> None:
        """Have the lines of a run of an engine, which seems to have ended, go on elsewhere."""
        death = (engine.url, run)
        # Lines that a run has not got yet may be on their way to the next one.
        runs = {run} if engine.answers else {run, None}
        lines = [line for line, attempt in self._attempts_in(engine) if attempt.run in runs]
        now_s = asyncio.get_running_loop().time()
        for line in lines:
            if line.attempt is not None and line.attempt.limit is not None:
                line.attempt.limit.reschedule(now_s)
            line.attempt = None
            line.changed.set()
            line.deaths.append(why)
        self.ends["lost"] += len(lines)
        engine.lines_lost += len(lines)
        self._deaths.add(death)
        if not engine.answers:
            self.engines.stop_lines(engine, EngineState.DOWN, why)
        self._carry_out(
            self.placement.engine_died(engine.url, death, [line.number for line in lines])
        )

    def looked_at(self, engine: RemoteEngine) -> None:
        """See ``EngineObserver``: find out whether a run of the engine has ended.

        A run has ended once another run answers, or nothing does for long. A run that answers again
        has not ended.
        """
        url, run = engine.url, engine.run
        if engine.is_dead and run is not None and self.placement.in_flight(url):
            self._died(engine, run, f"{url}: {engine.reason}")
        if engine.answers and run != engine.noted_run:
            engine.noted_run = run
            ended = {attempt.run for _, attempt in self._attempts_in(engine)} - {run, None}
            for each in ended:
                self._died(engine, str(each), f"{url} was started again")
        for death in [each for each in self._deaths if each[0] == url]:
            if engine.answers and death[1] == run:
                self._deaths.remove(death)
                self._carry_out(self.placement.withdraw(death))
            elif engine.answers or engine.is_dead:
                self._prove(death)

    def _attempts_in(self, engine: RemoteEngine) -> list[tuple[FleetLine, Attempt]]:
        """Return the lines that an engine has, and the attempts at them. O(their number)."""
        lines = [self._lines[number] for number in self.placement.lines_of(engine.url)]  # type: ignore[index]
        return [(line, line.attempt) for line in lines if line.attempt is not None]

    def _prove(self, death: tuple[str, str]) -> None:
        """Note that a run of an engine has ended for sure; give up the line that ends engines."""
        self._deaths.remove(death)
        placed, given_up = self.placement.prove(death)
        for number in given_up:
            line = self._lines[number]  # type: ignore[index]
            self.ends["given_up"] += 1
            reasons = "; ".join(line.deaths[-DEATHS_BEFORE_APART - 1 :])
            message = (
                "engines ended while they served this line, the last one with no other line beside"
                f" it; it is not tried again ({reasons})"
            )
            _log.error("%s, line %d: %s", line.request.batch_id, line.request.line, message)
            line.end(LineResult.unserved("engine_failed", message))
        self._carry_out(placed)

    # --- what engines want, and what they serve ---

    def has_lines(self, engine: RemoteEngine) -> bool:
        """See ``EngineObserver``."""
        return self.placement.in_flight(engine.url) > 0

    def changed(self, engine: RemoteEngine) -> None:
        """See ``EngineObserver``: place lines as the engine stands now."""
        is_open = self.engines.is_open(engine)
        placed = self.moves.set_engine(engine.url, engine.pool, is_open=is_open)
        for url, begins_lines in placed.items():
            known = self.engines[url]
            self._carry_out(
                self.placement.set_engine(
                    url, window=known.window, is_open=begins_lines, models=known.models
                )
            )

    def left(self, engine: RemoteEngine) -> None:
        """See ``EngineObserver``."""
        self.placement.remove_engine(engine.url)
        for death in [each for each in self._deaths if each[0] == engine.url]:
            self._prove(death)

    def hand_over(self, engine: RemoteEngine) -> None:
        """See ``EngineObserver``: ask for the lines that the engine is to take over, or to give
        back.
        """
        report = engine.last_report
        if report is None or not self.engines.is_open(engine):
            return
        now_s = self._monotonic_s()
        for number, _ in self.moves.look(engine.url, report.wants, report.waiting, now_s):
            line = self._lines[number]  # type: ignore[index]
            if line.attempt is not None:
                handing = partial(self._hand_back, line, line.attempt)
                self._background.start(_HAND_BACK, handing, engine.url)

    async def _hand_back(self, line: FleetLine, attempt: Attempt) -> None:
        """Ask the engine for a line; forget the move if the engine does not listen."""
        if not await attempt.engine.http.hand_back(attempt.name) and line.attempt is attempt:
            self.moves.stay(line.number)

    def names_changed(self) -> None:
        """See ``EngineObserver``: answer lines that wait for an adapter which no engine has any
        more.
        """
        for line in self._lines.values():
            if line.asked not in (None, *self.engines.served.names) and line.attempt is None:
                self._carry_out(self.placement.end(line.number))
                line.end(self._not_served(line))

    def model_changed(self) -> None:
        """See ``EngineObserver``."""
        self._listeners.tell()

    def _not_served(self, line: FleetLine) -> LineResult:
        body = {"error": not_served(line.asked, self.engines.served.names)}
        return LineResult(HTTPStatus.NOT_FOUND.value, "", body)
