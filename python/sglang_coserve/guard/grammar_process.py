"""The process that tries grammars: it forks for each, and reports the outcome.

A compiler of grammars in C++ ends its process on some (its stack overflows), takes
all memory on others, and hours on others yet.  Here it may: a fork has bounds, and
has nothing to lose.  Forking takes milliseconds, where starting a process takes
seconds; it is safe in this one, because it has no threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Final

from sglang_coserve.guard.grammar_compilation import TrialCompiler

__all__ = ["main", "serve_trials"]

MOST_CPU_S: Final = 10
"""Time that a trial may take; the schemas of real tools take tens of milliseconds."""

MOST_S: Final = 30.0
"""The same where other processes have most of the machine."""

MOST_MEMORY_BYTES: Final = 1 << 30
"""Memory that a trial may take beyond what every trial begins with."""

_MOST_AT_ONCE: Final = 2


@dataclass(slots=True)
class _Running:
    pid: int
    result: Connection
    deadline_s: float


def main() -> None:
    """Serve trials on standard input and output, of which nothing else may be written to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then hangs up.
    questions = Connection(os.dup(0), writable=False)
    answers = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)
    with contextlib.suppress(EOFError, OSError):
        serve_trials(questions, answers, TrialCompiler(questions.recv()))


def serve_trials(questions: Connection, answers: Connection, compiler: TrialCompiler) -> None:
    """Answer each (number, kind, text) with (number, what is wrong or None).

    Raises:
        EOFError: the server has hung up, or is no more.
    """
    waiting: list[tuple[int, tuple[str, str]]] = []
    running: dict[int, _Running] = {}
    while True:
        while waiting and len(running) < _MOST_AT_ONCE:
            number, key = waiting.pop(0)
            running[number] = _start(compiler, key)
        next_s = min((trial.deadline_s for trial in running.values()), default=None)
        timeout_s = None if next_s is None else max(0.0, next_s - time.monotonic())
        ready = wait([questions, *(trial.result for trial in running.values())], timeout_s)
        if questions in ready:
            number, kind, text = questions.recv()
            waiting.append((number, (kind, text)))
        now_s = time.monotonic()
        for number, trial in list(running.items()):
            if trial.result in ready or trial.deadline_s <= now_s:
                answers.send((number, _end(running.pop(number))))


def _start(compiler: TrialCompiler, key: tuple[str, str]) -> _Running:
    """Fork; the child reports through a pipe what is wrong with a grammar."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            _bound_this_process()
            answer = json.dumps(compiler.fault(*key)).encode()
            os.write(writer, answer[: 1 << 15])
        finally:
            os._exit(0)
    os.close(writer)
    return _Running(pid, Connection(reader), time.monotonic() + MOST_S)


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


def _end(trial: _Running) -> str | None:
    """Return what is wrong with a grammar; end its trial if that is not over."""
    text = b""
    with contextlib.suppress(EOFError, OSError):
        if trial.result.poll(0):
            text = os.read(trial.result.fileno(), 1 << 16)
    is_late = not text and time.monotonic() >= trial.deadline_s
    with contextlib.suppress(ProcessLookupError):
        os.kill(trial.pid, signal.SIGKILL)
    _, status = os.waitpid(trial.pid, 0)
    trial.result.close()
    if text:
        fault: str | None = json.loads(text)
        return fault
    if is_late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return f"it takes longer than {MOST_CPU_S} s to compile: make it smaller"
    return (
        "it needs more stack or memory than a grammar may have: take out references that lead "
        "back to themselves, deep nesting and large repetitions"
    )


if __name__ == "__main__":
    main()
