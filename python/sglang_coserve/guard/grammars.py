"""Keeps grammars from harming the scheduler: each is tried before it gets there, few are kept.

The server asks a process that tries grammars, started with the first of them, and caches its
verdicts. SGLang's scheduler keeps every compiled grammar until its cache is flushed, and XGrammar
caches their parts: clients that send a new schema with each request would exhaust the memory. Both
caches are bounded here.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from multiprocessing import Pipe
from typing import Any, Final

from cachetools import LRUCache

from sglang_coserve.guard.grammar_process import GrammarSettings
from sglang_coserve.replacements import replace

logger = logging.getLogger(__name__)

_MODULE = "sglang_coserve.guard.grammar_process"


class TrialProcess:
    """A child process that tries one grammar at a time, and ends when this process does."""

    def __init__(self, settings: GrammarSettings) -> None:
        self._connection, theirs = Pipe()
        # Not a process of ``multiprocessing``, which would import the server's main module.
        command = [sys.executable, "-m", _MODULE, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._connection.send(settings)

    def fault(self, kind: str, text: str) -> str | None:
        """Have a grammar tried; return what is wrong with it, None if nothing is.

        Raises:
            OSError, EOFError: the process has ended.
        """
        self._connection.send((kind, text))
        found: str | None = self._connection.recv()
        return found

    def close(self) -> None:
        """End the process and wait until it has ended."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


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
_UNTRIED: Final = ""


class GrammarTrials:
    """Tries each new grammar once, one after the other, and caches the verdict.

    The process is started with the first grammar, which therefore takes some seconds longer.
    """

    def __init__(self, settings: GrammarSettings) -> None:
        self._settings = settings
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._num_waiting = 0
        self._process: TrialProcess | None = None
        # One thread alone uses the process and writes the verdicts.
        self._thread = ThreadPoolExecutor(1, "grammar trials")

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
        self._thread.shutdown()
        if self._process is not None:
            self._process.close()

    async def _fault(self, kind: str, name: str, text: str) -> str | None:
        if len(text) > _MOST_CHARS:
            return f"it has {len(text)} characters: use at most {_MOST_CHARS}"
        key = sha256(f"{kind}\n{text}".encode()).digest()
        # At once, for the thread may be amid another trial, and forget one meanwhile.
        if (known := self._verdicts.get(key, _UNTRIED)) != _UNTRIED:
            return known
        if self._num_waiting >= _MOST_WAITING:
            raise ValueError(f"{name}: too many new grammars at once: try again later")
        self._num_waiting += 1
        try:
            tried = asyncio.get_running_loop().run_in_executor(
                self._thread, self._tried, key, kind, text
            )
            return await tried
        finally:
            self._num_waiting -= 1

    def _tried(self, key: bytes, kind: str, text: str) -> str | None:
        """Return the verdict, which the same grammar before this one may have got by now."""
        if key not in self._verdicts:
            try:
                if self._process is None:
                    self._process = TrialProcess(self._settings)
                self._verdicts[key] = self._process.fault(kind, text)
            except Exception as error:
                logger.exception("a grammar could not be tried: the next one starts the process")
                if self._process is not None:
                    self._process.close()
                    self._process = None
                raise ValueError("the grammar could not be tried: try again") from error
            if len(self._verdicts) > _MOST_REMEMBERED:
                self._verdicts.popitem(last=False)
        return self._verdicts[key]


_MOST_GRAMMARS: Final = 1024
_MOST_BYTES: Final = 256 << 20
"""Compiled for a large vocabulary, a schema takes up to a few megabytes. One that was dropped is
compiled again when needed, in tens of milliseconds outside of the scheduler's thread."""


def grammar_cache() -> LRUCache:
    """Return a cache for SGLang's compiled grammars, bounded in number and bytes."""
    return LRUCache(_MOST_BYTES, _num_bytes)


def install_compiler_bound() -> None:
    """Bound the cache of XGrammar's compiler in this process."""
    from sglang.srt.constrained import xgrammar_backend

    replace(
        "sglang.srt.constrained.xgrammar_backend.GrammarCompiler",
        partial(xgrammar_backend.GrammarCompiler, cache_limit_bytes=_MOST_BYTES),
    )


def _num_bytes(grammar: Any) -> int:
    """Return as how many bytes a compiled grammar counts: no more than the cache may have, which
    then has it alone, and no less than all could have alike."""
    inner = getattr(grammar, "grammar", grammar)  # Reasoning models wrap it.
    num_bytes = int(getattr(getattr(inner, "ctx", None), "memory_size_bytes", 0))
    return min(max(num_bytes, _MOST_BYTES // _MOST_GRAMMARS), _MOST_BYTES)
