"""Lines of which somebody else keeps account, on many engines."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Self

from sglang_coserve.errors import ServerGoneError
from sglang_coserve.fleet.backend import FleetBackend
from sglang_coserve.fleet.discovery import EngineSource, follow
from sglang_coserve.fleet.engine import EngineState
from sglang_coserve.jsonl.body_limits import BodyTooLargeError, check_body
from sglang_coserve.jsonl.request_line import (
    BadLineError,
    RequestLine,
    custom_id_of,
    line_head,
    parse_json,
    request_of,
)
from sglang_coserve.lines.backend import LineRequest, LineResult
from sglang_coserve.lines.background import Clock, TaskSupervisor
from sglang_coserve.lines.engine_lines import EngineLines
from sglang_coserve.lines.journal import LineTokens
from sglang_coserve.lines.serve_line import AttemptContext, EngineHealth, RetryPolicy, serve_line

_LOOK_INTERVAL_S: Final = 0.5
"""As often as the fleet looks at its engines."""


class Answer(NamedTuple):
    """What came of a line."""

    custom_id: str | None
    result: LineResult


class FleetLines:
    """Serves lines until each has its result. A context manager: leaving it ends all attempts.

    Lives on the event loop on which it is entered.
    """

    def __init__(
        self, engines: EngineSource, admin_key: str, *, job: str, no_engine_timeout_s: float
    ) -> None:
        """``job`` names it in the engines' logs."""
        self._background = TaskSupervisor()
        self._fleet = fleet = FleetBackend(admin_key, background=self._background)
        self._job = job
        self._no_engine_timeout_s = no_engine_timeout_s
        self._numbers = itertools.count(1)
        engine_lines = EngineLines()
        # Lines start over that were begun with a model of which there are no engines any more.
        fleet.when_changing(engine_lines.take_out)
        self._context = AttemptContext(
            backend=fleet,
            engine_lines=engine_lines,
            clock=Clock(),
            rng=random.Random(),
            retry_policy=RetryPolicy(retry_for_s=no_engine_timeout_s),
            health=EngineHealth(),
        )
        self._engines = engines

    async def __aenter__(self) -> Self:
        await self._fleet.__aenter__()
        self._following = self._background.start(
            "engine_discovery", partial(follow, [self._engines], self._fleet.engines.set_listed)
        )
        self._no_engine = asyncio.create_task(self._watch_for_engines())
        return self

    async def __aexit__(self, *error: object) -> None:
        tasks = {self._following, self._no_engine}
        for task in tasks:
            task.cancel()
        # What ended the watch was raised to those who had lines.
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._fleet.__aexit__(*error)

    async def answers(self, lines: Sequence[bytes | None]) -> list[Answer]:
        """Return what came of each of ``lines``, in their order; None is one without a text.

        Raises:
            ServerGoneError: no engine has taken lines for ``no_engine_timeout_s``.
        """
        answers = asyncio.gather(*map(self._answer, lines))
        try:
            ends: set[asyncio.Future[Any]] = {answers, self._no_engine}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not answers.done():
                self._no_engine.result()
            return await answers
        finally:
            answers.cancel()
            # However it ended: what a line raised after the first one nobody waits for.
            await asyncio.gather(answers, return_exceptions=True)

    async def _answer(self, content: bytes | None) -> Answer:
        await self._fleet.engines.ready()
        custom_id: str | None = None
        try:
            if content is None:
                raise BadLineError(
                    "invalid_json_line", "no text, or one longer than any engine takes"
                )
            check_body(content, self._fleet.limits)
            fields = parse_json(content)
            custom_id = custom_id_of(fields)
            request = request_of(fields, None)
        except BodyTooLargeError as error:
            result = LineResult.unserved("line_too_large", str(error))
            return Answer(_id_in(content or b""), result)
        except BadLineError as error:
            return Answer(custom_id, LineResult.unserved(error.code, str(error)))
        return Answer(custom_id, await self._served(content, request))

    async def _served(self, content: bytes, request: RequestLine) -> LineResult:
        async def fresh_body() -> dict[str, object]:
            body: dict[str, object] = parse_json(content)["body"]
            return body

        line = LineRequest(
            batch_id=self._job,
            line=next(self._numbers),
            endpoint=request.url,
            body=request.body,
        )
        received = LineTokens(self._fleet.model)
        result, _ = await serve_line(line, fresh_body, received, self._context)
        return result

    async def _watch_for_engines(self) -> None:
        """Wait for as long as there are engines.

        Raises:
            ServerGoneError: there are none, or none that speaks with us.
        """
        last_up_s = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            states = {engine.state for engine in self._fleet.engines}
            if EngineState.UP in states:
                last_up_s = time.monotonic()
            elif states == {EngineState.REFUSING}:
                raise ServerGoneError(f"every engine refuses lines: {self._reasons()}")
            elif time.monotonic() - last_up_s >= self._no_engine_timeout_s:
                message = f"no engine has taken lines for {self._no_engine_timeout_s:g} s"
                raise ServerGoneError(f"{message}: {self._reasons()}")

    def _reasons(self) -> str:
        reasons = [f"{engine.url}: {engine.reason}" for engine in self._fleet.engines]
        return "; ".join([*reasons, *self._fleet.engines.left_out.values()]) or "there is none"


def _id_in(content: bytes) -> str | None:
    """Return the id of a line that is too large to be parsed; None if it is no request."""
    try:
        return line_head(content, None).custom_id
    except BadLineError:
        return None
