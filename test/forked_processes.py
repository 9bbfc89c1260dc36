"""Processes that fork from one that has SGLang imported: one for a whole run of the tests.

The import takes seven seconds of CPU time. A server is three processes and an engine two or more,
so it would be most of what their tests wait for. Tests of the start itself run the real command.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final

import setproctitle

PRELOADED: Final = (
    "sglang_coserve.srt.cpu.defaults",  # Before SGLang, which imports some of what it mends.
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",  # All models, one by one.
    "sglang_coserve.srt.cpu.attention",
    "sglang_coserve.srt.scheduler.scheduler",
    "sglang_coserve.srt.launch",
    "sglang_coserve.srt.server_app",
    "sglang.srt.managers.detokenizer_manager",
)
"""What servers and engines import."""

FORKED: Final = {f"sglang_coserve.{name}" for name in ("demo", "launch_server", "srt.stock_server")}
READ_LATE: Final = (
    *("COSERVE_", "OTEL_", "SGLANG_TIMEOUT_KEEP_ALIVE"),
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY",
)
"""A server with any other variable changed is started anew: an import may have read it."""

STARTS_KEEPER: Final = threading.Lock()
"""A test may start its first servers from several threads."""


class Forked(ForkServerProcess):
    """A process of ``multiprocessing``, with the environment of the one that makes it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._environment = dict(os.environ)

    def start(self) -> None:
        server: Any = forkserver._forkserver
        with STARTS_KEEPER:
            if server._forkserver_address is None:
                server._forkserver_address = keeper_address()
                # Processes keep it open. The keeper is to end though some of them have not.
                server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
        server.ensure_running = resource_tracker.ensure_running
        self._keeper = server._forkserver_address
        super().start()

    def run(self) -> None:
        reset_signals()
        forkserver._forkserver._forkserver_address = self._keeper
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


def keeper_address() -> str:
    """Return where the keeper of this run listens; whoever comes first starts it."""
    run, controller = os.environ.get("PYTEST_XDIST_TESTRUNUID"), os.getppid()
    if run is None:
        run, controller = str(os.getpid()), os.getpid()
    address = Path(tempfile.gettempdir(), f"forked-{run}")
    mine = f"{address}-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(mine)
        listener.listen(64)
        with suppress(FileExistsError):
            os.link(mine, address)
            command = [sys.executable, __file__, str(listener.fileno()), str(controller)]
            command.append(str(address))
            subprocess.run(command, pass_fds=[listener.fileno()], check=True, timeout=60)
    Path(mine).unlink()
    return str(address)


class ForkedServers:
    """Starts commands as ``subprocess.Popen`` does; our servers from the keeper."""

    def __init__(self) -> None:
        self._started: list[ForkedServer] = []

    def start(
        self, command: Sequence[str], *, env: dict[str, str], stdout: Any, **options: Any
    ) -> Any:
        """Start ``command`` with ``env``; its output goes to ``stdout``, a file."""
        if not can_fork(command, env):
            return subprocess.Popen(command, env=env, stdout=stdout, **options)
        self._started.append(ForkedServer(command[2:], env, stdout.name))
        return self._started[-1]

    def close(self) -> None:
        """End all of its servers."""
        for server in self._started:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def can_fork(command: Sequence[str], environment: dict[str, str]) -> bool:
    """Return whether it is a server that imports what is imported already, as it was imported."""
    from sglang_coserve.srt.emulation.model_directory import read_emulation
    from sglang_coserve.srt.start_defaults import model_path_in

    if command[:2] != [sys.executable, "-m"] or command[2] not in FORKED:
        return False
    changed = {name for name, _ in environment.items() ^ os.environ.items()}
    is_late = all(name.startswith(READ_LATE) for name in changed)
    model = model_path_in(command)
    # Emulation has to come before SGLang.
    return is_late and not (model is not None and read_emulation(Path(model)))


class ForkedServer:
    """What is used of a ``subprocess.Popen``."""

    def __init__(self, argv: Sequence[str], environment: dict[str, str], log: str) -> None:
        self._process = Forked(target=run_module, args=(argv, environment, log))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._asking = threading.Lock()

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with self._asking:
            return self._process.exitcode

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


def run_module(argv: Sequence[str], environment: dict[str, str], log: str) -> None:
    """Run a module as ``python -m`` does; the processes that it starts fork, too."""
    from sglang_coserve.local_server import ChildServer

    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0] = str(Path.cwd())
    setproctitle.setproctitle(" ".join([*argv, ">", log]))  # Tests find it by its files.
    slow_steps_beside(Path(log))
    ChildServer.start_process = staticmethod(ForkedServers().start)
    os.register_at_fork(after_in_child=reset_signals)
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = always_forks
    sys.argv = [*argv]
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()


def slow_steps_beside(log: Path) -> None:
    """Let a test slow down the steps of this server's engines.

    While a file with the name ``slow`` stands beside the log, a step lasts as many seconds as the
    file says, or longer.
    """
    from sglang_coserve.srt.scheduler.scheduler import CoserveScheduler

    run_batch, slow = CoserveScheduler.run_batch, log.with_name("slow")

    def run_no_faster(*args: Any, **options: Any) -> Any:
        with suppress(FileNotFoundError):
            time.sleep(float(slow.read_text()))
        return run_batch(*args, **options)

    CoserveScheduler.run_batch = run_no_faster


def always_forks(_method: str | None, force: bool = False) -> None:
    """Stand in for ``multiprocessing.set_start_method``: SGLang asks for another one."""


def reset_signals() -> None:
    """Leave the handlers of the parent behind, as a new program does."""
    for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def keep(listener: int, controller: int, address: str) -> None:
    """Import SGLang, and fork what is asked for until the process of the whole run ends."""
    alive, closed_at_the_end = os.pipe()
    run_ends = os.pidfd_open(controller)
    # No child of the tests' process: an engine that stops there kills all that it has.
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        select.select([run_ends], [], [])
        Path(address).unlink()
        os._exit(0)
    os.close(closed_at_the_end)
    # Sent to the parent by an engine that fails.
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    from sglang_coserve.srt.cpu import defaults as cpu

    cpu.set_environment_defaults()
    for name in PRELOADED:
        importlib.import_module(name)
    # Looks for the arguments in front of the environment, which its children replace.
    setproctitle.getproctitle()
    # None of it is garbage, and to look takes longer than the start of an engine.
    gc.freeze()
    forkserver.main(listener, alive, [])


if __name__ == "__main__":
    keep(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
