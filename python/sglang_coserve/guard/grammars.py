"""Keeps grammars from harming the scheduler: each is tried before it gets there, few are kept.

The server asks a process that tries grammars, started with the first of them, and caches its
verdicts. SGLang's scheduler keeps every compiled grammar until its cache is flushed, and XGrammar
caches their parts: clients that send a new schema with each request would exhaust the memory. Both
caches are bounded here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from multiprocessing.connection import Connection
from typing import Any, Final

from sglang_coserve.guard.grammar_process import GrammarSettings
from sglang_coserve.guard.replacements import replace

logger = logging.getLogger(__name__)

_MODULE = "sglang_coserve.guard.grammar_process"


class TrialProcess:
    """A child process, which ends when this one does. For one thread.

    ``on_answer`` is called with the number of a question and what is wrong with its
    grammar, ``on_end`` when the process has ended; both from another thread.
    """

    def __init__(
        self,
        settings: GrammarSettings,
        *,
        on_answer: Callable[[int, str | None], object],
        on_end: Callable[[], object],
    ) -> None:
        # Not a process of ``multiprocessing``, which would import the server's main module.
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions = Connection(os.dup(self._process.stdin.fileno()), readable=False)
        self._answers = Connection(os.dup(self._process.stdout.fileno()), writable=False)
        self._process.stdin.close()
        self._process.stdout.close()
        self._on_answer = on_answer
        self._on_end = on_end
        self._listener = threading.Thread(target=self._listen, name="grammar verdicts", daemon=True)
        self._listener.start()
        self._questions.send(settings)

    @property
    def is_alive(self) -> bool:
        """False once the process has ended."""
        return self._process.poll() is None

    def ask(self, number: int, kind: str, text: str) -> None:
        """Have a grammar tried.

        Raises:
            OSError: the process has ended.
        """
        self._questions.send((number, kind, text))

    def close(self) -> None:
        """End the process and wait until it has ended."""
        self._questions.close()
        self._listener.join()

    def _listen(self) -> None:
        try:
            while True:
                self._on_answer(*self._answers.recv())
        except (EOFError, OSError):
            logger.warning("the process that tries grammars has ended: %s", self._process.wait())
        except Exception:
            logger.exception("the process that tries grammars cannot be understood: it is ended")
        finally:
            # What it would still answer nobody would hear: the next grammar gets another process.
            self._process.kill()
            self._process.wait()
            self._on_end()


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


_MOST_GRAMMARS: Final = 1024
_MOST_BYTES: Final = 256 << 20
"""Compiled for a large vocabulary, a schema takes up to a few megabytes. An retracted one is
compiled again when needed, in tens of milliseconds outside of the scheduler's thread."""


class GrammarCache(OrderedDict[tuple[str, str], Any]):
    """An LRU cache of grammars by kind and text, bounded in number and bytes."""

    def __init__(self, most: int = _MOST_GRAMMARS, most_bytes: int = _MOST_BYTES) -> None:
        super().__init__()
        self._most = most
        self._most_bytes = most_bytes
        self._num_bytes = 0

    def get(self, key: tuple[str, str], default: Any = None) -> Any:
        """Return the grammar of ``key`` and mark it as most recently used."""
        if key not in self:
            return default
        self.move_to_end(key)
        return self[key]

    def __setitem__(self, key: tuple[str, str], value: Any) -> None:
        if key in self:
            del self[key]
        super().__setitem__(key, value)
        self._num_bytes += _num_bytes(value)
        while len(self) > self._most or (self._num_bytes > self._most_bytes and len(self) > 1):
            del self[next(iter(self))]

    def __delitem__(self, key: tuple[str, str]) -> None:
        self._num_bytes -= _num_bytes(self[key])
        super().__delitem__(key)

    def clear(self) -> None:
        """Remove all entries."""
        super().clear()
        self._num_bytes = 0


def install_compiler_bound() -> None:
    """Bound the cache of XGrammar's compiler in this process."""
    from sglang.srt.constrained import xgrammar_backend

    replace(
        "sglang.srt.constrained.xgrammar_backend.GrammarCompiler",
        partial(xgrammar_backend.GrammarCompiler, cache_limit_bytes=_MOST_BYTES),
    )


def _num_bytes(grammar: Any) -> int:
    """Return the size of a compiled grammar; 0 if unknown."""
    inner = getattr(grammar, "grammar", grammar)  # Reasoning models wrap it.
    return int(getattr(getattr(inner, "ctx", None), "memory_size_bytes", 0))
