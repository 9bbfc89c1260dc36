"""Runs the profiler's executor in separate processes, one for each tensor-parallel rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any, Self

from sglang_coserve.errors import CoserveError, ServerError, StartupError
from sglang_coserve.profiler.fits import ProfiledMachine
from sglang_coserve.profiler.shapes import ExecutorLimits, StepShape
from sglang_coserve.srt import compat
from sglang_coserve.srt.optional_parts import platform_for
from sglang_coserve.srt.start_defaults import model_path_in, set_up_platform


class ExecutorProcesses:
    """A ``profiler.Executor`` that starts SGLang with the given command-line flags.

    A context manager that ends the processes on exit. They ignore Ctrl-C: the caller
    decides when to stop.

    Raises:
        UnsupportedError: SGLang has another version, or a setting cannot be profiled.
        StartupError: SGLang did not start; the message holds its error.
    """

    limits: ExecutorLimits
    machine: ProfiledMachine

    def __init__(self, argv: list[str]) -> None:
        compat.check_version()
        platform = set_up_platform(model_path_in(argv))
        from sglang.srt.server_args import PortArgs

        from sglang_coserve.srt.launch import parse_server_args

        server_args = parse_server_args(argv, platform)
        compat.check_server_args(compat.settings_of(server_args), server_args._coserve)
        compat.check_one_replica(compat.settings_of(server_args))
        port_args = PortArgs.init_new(server_args)
        context = multiprocessing.get_context("spawn")
        self._connections: list[Any] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        with platform.cores_for(server_args):
            for tp_rank in range(server_args.tp_size):
                connection, remote = context.Pipe()
                process = context.Process(
                    target=_serve, args=(remote, server_args, port_args, tp_rank), daemon=True
                )
                process.start()
                remote.close()
                self._connections.append(connection)
                self._processes.append(process)
        try:
            self.limits, self.machine = self._receive(StartupError)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, shape: StepShape) -> float:
        """See ``profiler.Executor.run``."""
        for connection in self._connections:
            with suppress(OSError):  # It has died, which is seen below.
                connection.send(shape)
        seconds: float = self._receive(ServerError)
        return seconds

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()

    def _receive(self, kind: type[CoserveError]) -> Any:
        """Wait for an answer of every rank, and return that of rank 0.

        Whichever answers or dies first is heard first: the others may wait for it for ever.
        """
        awaited: dict[Any, int] = {each: rank for rank, each in enumerate(self._connections)}
        answers = {}
        while awaited:
            ready: list[Any] = wait(awaited)
            for connection in ready:
                rank = awaited.pop(connection)
                try:
                    answers[rank], error = connection.recv()
                except (EOFError, OSError):
                    self._processes[rank].join(10)
                    code = self._processes[rank].exitcode
                    raise kind(f"SGLang's process {rank} died with exit code {code}") from None
                if error is not None:
                    raise kind(f"SGLang failed:\n{error}")
        return answers[0]


def _serve(connection: Any, server_args: Any, port_args: Any, tp_rank: int) -> None:
    """Run one rank: send its limits and machine, then a time for each shape received."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        scheduler = _start_scheduler(server_args, port_args, tp_rank)
        from sglang_coserve.srt.profiling.executor import SchedulerExecutor, machine_of

        executor = SchedulerExecutor(scheduler)
        answer: Any = executor.limits, machine_of(scheduler)
        while True:
            connection.send((answer, None))
            answer = executor.run(connection.recv())
    except EOFError:
        os._exit(0)
    except BaseException:
        connection.send((None, traceback.format_exc()))
        sys.stderr.flush()
        os._exit(1)


def _start_scheduler(server_args: Any, port_args: Any, tp_rank: int) -> Any:
    """Return SGLang's scheduler with its model loaded, without running its event loop."""
    from sglang.srt.managers.scheduler import Scheduler

    platform_for(None).install_replacements()
    return compat.start_scheduler(Scheduler, server_args, port_args, tp_rank, configures=True)
