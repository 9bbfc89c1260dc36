"""Asks the process that tries grammars, and caches its verdicts."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any, Final

from sglang_coserve.srt.grammar_trial.compilation import GrammarSettings
from sglang_coserve.srt.grammar_trial.trial_process import TrialProcess

__all__ = ["GrammarTrials"]

_KINDS: Final = (
    *(("json", "json_schema"), ("regex", "regex"), ("ebnf", "ebnf")),
    ("structural_tag", "structural_tag"),
)
"""SGLang's name of a kind of grammar, and the sampling parameter that holds one."""

_MOST_REMEMBERED: Final = 10_000
"""Verdicts, a few hundred bytes each."""

_MOST_WAITING: Final = 256
"""Grammars whose trial is not over; more would wait for longer than their clients do."""

_MOST_CHARS: Final = 1 << 20

logger = logging.getLogger(__name__)


class GrammarTrials:
    """Tries each new grammar once, and caches the verdict.

    The process is started with the first grammar, which therefore takes some seconds
    longer. Lives on one event loop.
    """

    def __init__(self, settings: GrammarSettings) -> None:
        self._settings = settings
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._pending: dict[bytes, asyncio.Future[str | None]] = {}
        self._numbers: dict[int, bytes] = {}
        self._next_number = 0
        self._process: TrialProcess | None = None
        # What is sent may be longer than the pipe, and starting a process takes a while.
        self._sender = ThreadPoolExecutor(1, "grammar trials")

    async def check(self, sampling_params: Any) -> None:
        """Wait until the grammar of SGLang's ``SamplingParams``, if any, has been tried.

        Raises:
            ValueError: it is malformed, or would harm the scheduler.
        """
        for kind, name in _KINDS:
            text = getattr(sampling_params, name)
            if text is not None:
                fault = await self._fault(kind, name, text)
                if fault is not None:
                    raise ValueError(f"{name} cannot be used: {fault}")

    def close(self) -> None:
        """End the process, which otherwise ends with this one."""
        self._sender.shutdown()
        if self._process is not None:
            self._process.close()

    async def _fault(self, kind: str, name: str, text: str) -> str | None:
        if len(text) > _MOST_CHARS:
            return f"it has {len(text)} characters: use at most {_MOST_CHARS}"
        key = sha256(f"{kind}\n{text}".encode()).digest()
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
            return self._verdicts[key]
        if key not in self._pending:
            if len(self._pending) >= _MOST_WAITING:
                raise ValueError(f"{name}: too many new grammars at once: try again later")
            self._send(key, kind, text)
        # A client that disconnects must not cancel the others' answer.
        return await asyncio.shield(self._pending[key])

    def _send(self, key: bytes, kind: str, text: str) -> None:
        loop = asyncio.get_running_loop()
        self._next_number += 1
        self._numbers[self._next_number] = key
        self._pending[key] = loop.create_future()
        self._sender.submit(self._ask, loop, self._next_number, kind, text)

    def _ask(self, loop: asyncio.AbstractEventLoop, number: int, kind: str, text: str) -> None:
        """Send a grammar to the process, started if there is none; runs in the sender's thread."""
        try:
            if self._process is None or not self._process.is_alive:
                self._process = TrialProcess(
                    self._settings,
                    on_answer=lambda *answer: loop.call_soon_threadsafe(self._settle, *answer),
                    on_end=lambda: loop.call_soon_threadsafe(self._give_up),
                )
            self._process.ask(number, kind, text)
        except Exception:
            logger.exception("a grammar could not be tried")
            loop.call_soon_threadsafe(self._give_up)

    def _settle(self, number: int, fault: str | None) -> None:
        key = self._numbers.pop(number, None)
        if key is None:
            return
        self._verdicts[key] = fault
        if len(self._verdicts) > _MOST_REMEMBERED:
            self._verdicts.popitem(last=False)
        self._pending.pop(key).set_result(fault)

    def _give_up(self) -> None:
        """Fail all waiting calls: the process has ended. The next grammar starts it again."""
        for key in self._numbers.values():
            waiting = self._pending.pop(key)
            waiting.set_exception(ValueError("the grammar could not be tried: try again"))
            waiting.exception()  # Those who wait may have left.
        self._numbers.clear()
