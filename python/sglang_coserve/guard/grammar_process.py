"""The process that tries grammars: it forks for each, and reports the outcome.

A fork compiles a grammar as SGLang's scheduler would, and walks a few tokens of it. A compiler of
grammars in C++ ends its process on some (its stack overflows), takes all memory on others, and
hours on others yet. Here it may: a fork has bounds, and has nothing to lose. Forking takes
milliseconds, where starting a process takes seconds; it is safe in this one, because it has no
threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

_WALK_TOKENS: Final = 24
_MOST_STEP_S: Final = 0.25
"""CPU time for the mask of one token: the scheduler makes it while all other requests wait."""

_MOST_MESSAGE_CHARS: Final = 500

_STACK_BYTES: Final = 4 << 20
"""Half of what threads have by default: a grammar that just fits here fits there easily."""


@dataclass(frozen=True, slots=True)
class GrammarSettings:
    """What the scheduler compiles grammars for."""

    tokenizer: Any
    vocab_size: int
    eos_token_ids: Collection[int] | None
    any_whitespace: bool


class TrialCompiler:
    """Holds the state that every trial begins with."""

    def __init__(self, settings: GrammarSettings) -> None:
        import xgrammar

        tokenizer = settings.tokenizer
        if hasattr(tokenizer, "init_xgrammar"):
            info, _ = tokenizer.init_xgrammar()
        else:
            info = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer,
                vocab_size=settings.vocab_size,
                stop_token_ids=list(settings.eos_token_ids or ()) or None,
            )
        self._info = info
        self._any_whitespace = settings.any_whitespace

    def fault(self, kind: str, text: str) -> str | None:
        """Return what is wrong with a grammar, None if nothing is."""
        faults: list[str | None] = []

        def run() -> None:
            try:
                faults.append(self._walk(self._compiled(kind, text)))
            except MemoryError:
                faults.append("it takes more memory than a grammar may have")
            except Exception as error:
                faults.append(_message(error))

        threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return faults[0]

    def _compiled(self, kind: str, text: str) -> Any:
        import xgrammar

        compiler = xgrammar.GrammarCompiler(self._info, max_threads=2)
        if kind == "json":
            if text == "$$ANY$$":
                return compiler.compile_builtin_json_grammar()
            return compiler.compile_json_schema(text, any_whitespace=self._any_whitespace)
        if kind == "regex":
            return compiler.compile_regex(text)
        if kind == "ebnf":
            return compiler.compile_grammar(text)
        return compiler.compile_structural_tag(_structural_tag(text))

    def _walk(self, compiled: Any) -> str | None:
        """Follow random tokens that the grammar allows; they are the same every time."""
        import xgrammar

        matcher = xgrammar.GrammarMatcher(compiled)
        mask = xgrammar.allocate_token_bitmask(1, self._info.vocab_size)
        chance = random.Random(0)
        for _ in range(_WALK_TOKENS):
            begin_s = time.thread_time()
            matcher.fill_next_token_bitmask(mask)
            allowed = _allowed(mask, self._info.vocab_size)
            if not allowed:
                return "it allows no token at all"
            matcher.accept_token(chance.choice(allowed))
            step_s = time.thread_time() - begin_s
            if step_s > _MOST_STEP_S:
                return f"it takes {step_s * 1e3:.0f} ms for a token: make it smaller"
            if matcher.is_terminated():
                return None
        return None


def _message(error: Exception) -> str:
    """Return what a compiler says, without the place in its source."""
    if not isinstance(error, RuntimeError | ValueError):
        return f"malformed: {type(error).__name__}: {error}"
    said = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).strip()
    return said[:_MOST_MESSAGE_CHARS] or type(error).__name__


def _allowed(mask: Any, vocab_size: int) -> list[int]:
    """Return the tokens whose bit is set in a row of 32-bit words."""
    import numpy

    bits = numpy.unpackbits(mask.numpy().view(numpy.uint8), bitorder="little")
    tokens: list[int] = numpy.flatnonzero(bits[:vocab_size]).tolist()
    return tokens


def _structural_tag(text: str) -> Any:
    """Return what xgrammar compiles: SGLang also takes an older form, and missing schemas."""
    from xgrammar import StructuralTag, StructuralTagItem

    tag = json.loads(text)
    if tag.get("structures") is None:
        return json.dumps(_with_schemas(tag))
    items = [
        StructuralTagItem(
            begin=one["begin"], schema=json.dumps(one.get("schema") or {}), end=one["end"]
        )
        for one in tag["structures"]
    ]
    made: Any = StructuralTag.from_legacy_structural_tag(items, tag["triggers"])
    made.format.at_least_one = tag.get("at_least_one", False)
    return made


def _with_schemas(tag: Any) -> Any:
    if isinstance(tag, list):
        return [_with_schemas(item) for item in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") in ("json_schema", "qwen_xml_parameter"):
        return {**tag, "json_schema": tag.get("json_schema") or {}}
    return {key: _with_schemas(value) for key, value in tag.items()}


MOST_CPU_S: Final = 10
"""Time that a trial may take; the schemas of real tools take tens of milliseconds."""

MOST_S: Final = 30.0
"""The same where other processes have most of the machine."""

MOST_MEMORY_BYTES: Final = 1 << 30
"""Memory that a trial may take beyond what every trial begins with."""


def main(connection: Connection) -> None:
    """Serve trials on the other end of a server's connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then hangs up.
    with contextlib.suppress(EOFError, OSError):
        serve_trials(connection, TrialCompiler(connection.recv()))


def serve_trials(connection: Connection, compiler: TrialCompiler) -> None:
    """Answer each (kind, text) with what is wrong, None if nothing is.

    Raises:
        EOFError: the server has hung up, or is no more.
    """
    while True:
        connection.send(_fault_in_a_fork(compiler, *connection.recv()))


def _fault_in_a_fork(compiler: TrialCompiler, kind: str, text: str) -> str | None:
    """Fork; the child reports through a pipe what is wrong with a grammar."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            _bound_this_process()
            answer = json.dumps(compiler.fault(kind, text)).encode()
            os.write(writer, answer[: 1 << 15])
        finally:
            os._exit(0)
    os.close(writer)
    with Connection(reader) as result:
        is_late = not result.poll(MOST_S)
        said = b"" if is_late else os.read(reader, 1 << 16)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if said:
        fault: str | None = json.loads(said)
        return fault
    if is_late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return f"it takes longer than {MOST_CPU_S} s to compile: make it smaller"
    return (
        "it needs more stack or memory than a grammar may have: take out references that lead "
        "back to themselves, deep nesting and large repetitions"
    )


def _bound_this_process() -> None:
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    used_bytes = num_pages * resource.getpagesize()
    limits = {
        resource.RLIMIT_AS: used_bytes + MOST_MEMORY_BYTES,
        resource.RLIMIT_CPU: MOST_CPU_S,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (value if hard < 0 else min(value, hard), hard))
    # What a crash writes would be taken for one of the server.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
