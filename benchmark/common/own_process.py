"""An object in a process of its own, whose methods are called from here."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Self

import psutil

_ANSWER_TIMEOUT_S: Final = 600.0


class OwnProcess:
    """Makes the object in a new process; a context that ends the process and its children."""

    def __init__(
        self,
        make: Callable[..., object],
        *arguments: Any,
        stops_when_idle: bool = False,
        preloaded: Sequence[str] = (),
    ) -> None:
        """Start, and wait until the object is made.

        Args:
            make: returns the object; it and its arguments are pickled.
            arguments: of ``make``.
            stops_when_idle: stop all its processes while none of its methods runs.
            preloaded: modules that are imported once, in a process from which this one and
                later ones fork; those of the first process started so count for all.
        """
        self._stops_when_idle = stops_when_idle
        context: Any = multiprocessing.get_context("forkserver" if preloaded else "spawn")
        if preloaded:
            context.set_forkserver_preload([*preloaded])
        self._connection, remote = context.Pipe()
        self._process = context.Process(target=_serve, args=(remote, make, arguments))
        self._process.start()
        remote.close()
        try:
            self._answer(_ANSWER_TIMEOUT_S)
        except BaseException:
            self.end()  # Nobody else will: the context is not entered.
            raise
        self._signal(signal.SIGSTOP)

    def call(self, name: str, *arguments: Any, timeout_s: float = _ANSWER_TIMEOUT_S) -> Any:
        """Return what the object's method returned.

        Raises:
            SystemExit: it raised, with the traceback; or the process ended, or took longer.
        """
        self._signal(signal.SIGCONT)
        self._connection.send((name, arguments))
        answer = self._answer(timeout_s)
        self._signal(signal.SIGSTOP)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """End the process and its children."""
        self._connection.close()
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.join()

    def _answer(self, timeout_s: float) -> Any:
        if not self._connection.poll(timeout_s):
            raise SystemExit(f"no answer in {timeout_s:.0f} s")
        try:
            result, error = self._connection.recv()
        except EOFError:
            raise SystemExit("the process has ended; its own output says why") from None
        if error is not None:
            raise SystemExit(error)
        return result

    def _signal(self, number: signal.Signals) -> None:
        if not self._stops_when_idle:
            return
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _tree(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._process.pid)
            return [*parent.children(recursive=True), parent]
        return []


def _serve(connection: Any, make: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """Run the methods that are asked for, until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The benchmark ends its processes itself.
    try:
        made = make(*arguments)
        connection.send((None, None))
        while True:
            name, given = connection.recv()
            connection.send((getattr(made, name)(*given), None))
    except EOFError:
        pass
    except BaseException:
        connection.send((None, traceback.format_exc()))
    finally:
        os._exit(0)
