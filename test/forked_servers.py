"""Servers that fork from a process which has SGLang imported.

A server is three processes, and each imports SGLang for seven seconds of CPU time: most of what
tests of servers would wait for.  Those that test the start itself run the real command.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import setproctitle

__all__ = ["PRELOADED", "ForkedServers"]

PRELOADED: Final = [
    "sglang_coserve.srt.cpu.defaults",  # Before SGLang, which imports some of what it mends.
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",  # All models, one by one.
    "sglang_coserve.srt.cpu.attention",
    "sglang_coserve.srt.scheduler.scheduler",
]
"""What every engine imports."""

FORKED: Final = {"sglang_coserve.launch_server", "sglang_coserve.srt.stock_server"}
READ_LATE: Final = ("COSERVE_", "OTEL_", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY")
"""A server with any other variable changed is started anew: an import may have read it."""

REAP_S: Final = 0.05


class ForkedServers:
    """Starts commands as ``subprocess.Popen`` does; our servers from a process that it keeps."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keeper: socket.socket | None = None

    def start(
        self, command: Sequence[str], *, env: dict[str, str], stdout: Any, **options: Any
    ) -> Any:
        """Start ``command`` with ``env``; its output goes to ``stdout``, a file."""
        if not can_fork(command, env):
            return subprocess.Popen(command, env=env, stdout=stdout, **options)
        with self._lock:
            pid = self._ask({"argv": [*command[2:]], "env": env}, [stdout.fileno()])
        assert pid is not None
        return ForkedServer(pid, self._status)

    def close(self) -> None:
        """End all of its servers."""
        with self._lock:
            if self._keeper is not None:
                self._keeper.close()
                self._keeper = None

    def _status(self, pid: int) -> int | None:
        with self._lock:
            return self._ask({"pid": pid})

    def _ask(self, request: dict[str, Any], files: Sequence[int] = ()) -> int | None:
        if self._keeper is None:
            self._keeper = start_keeper()
        socket.send_fds(self._keeper, [json.dumps(request).encode()], files)
        answer: int | None = json.loads(self._keeper.recv(1 << 10))
        return answer


def start_keeper() -> socket.socket:
    """Start the process that imports SGLang, and return a connection to it."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        command = [sys.executable, __file__, str(there.fileno())]
        subprocess.run(command, pass_fds=[there.fileno()], check=True, timeout=60)
    return here


def can_fork(command: Sequence[str], environment: dict[str, str]) -> bool:
    """Return whether it is a server that imports what is imported already, as it was imported."""
    from sglang_coserve.srt.start_defaults import is_emulated, model_path_in

    if command[:2] != [sys.executable, "-m"] or command[2] not in FORKED:
        return False
    changed = {name for name, _ in environment.items() ^ os.environ.items()}
    is_late = all(name.startswith(READ_LATE) for name in changed)
    model = model_path_in(command)
    # Emulation has to come before SGLang.
    return is_late and not (model is not None and is_emulated(Path(model)))


class ForkedServer:
    """What is used of a ``subprocess.Popen``."""

    def __init__(self, pid: int, status: Callable[[int], int | None]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._status(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout or 3600)
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 3600)
            time.sleep(0.02)
        return status

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def keep(connection: socket.socket) -> tuple[list[str], dict[str, str]] | None:
    """Answer requests until the connection closes; in a forked process, return what it runs."""
    statuses: dict[int, int | None] = {}
    while True:
        is_asked, _, _ = select.select([connection], [], [], REAP_S)
        for running in [pid for pid, status in statuses.items() if status is None]:
            pid, status = os.waitpid(running, os.WNOHANG)
            if pid:
                statuses[pid] = os.waitstatus_to_exitcode(status)
        if not is_asked:
            continue
        message, files, _, _ = socket.recv_fds(connection, 1 << 20, 1)
        if not message:
            break
        request = json.loads(message)
        if "argv" not in request:
            connection.send(json.dumps(statuses[request["pid"]]).encode())
            continue
        pid = os.fork()
        if not pid:
            connection.close()
            os.setsid()
            for number in (1, 2):
                os.dup2(files[0], number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.close(files[0])
            return request["argv"], request["env"]
        statuses[pid] = None
        os.close(files[0])
        connection.send(json.dumps(pid).encode())
    for pid in statuses:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return None


def run(argv: Sequence[str], environment: dict[str, str]) -> None:
    """Run a module as ``python -m`` does; the processes that it starts fork, too."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0] = str(Path.cwd())
    os.register_at_fork(after_in_child=reset_signals)
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = always_forks  # type: ignore[method-assign]
    sys.argv = [*argv]
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


def always_forks(_method: str | None, force: bool = False) -> None:
    """Stand in for ``multiprocessing.set_start_method``: SGLang asks for another one."""


def reset_signals() -> None:
    """Leave the handlers of the parent behind, as a new program does."""
    for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    # No child of the tests' process: an engine that stops there kills all that it has.
    if os.fork():
        os._exit(0)
    os.setsid()
    from sglang_coserve.srt.cpu import defaults as cpu

    cpu.set_environment_defaults()
    server = ["sglang_coserve.srt.launch", "sglang.srt.managers.detokenizer_manager"]
    for name in [*PRELOADED, *server]:
        importlib.import_module(name)
    # Looks for the arguments in front of the environment, which is replaced below.
    setproctitle.getproctitle()
    started = keep(connection)
    if started is None:
        os._exit(0)
    run(*started)


if __name__ == "__main__":
    main()
