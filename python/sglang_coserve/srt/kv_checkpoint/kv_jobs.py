"""Work on the directory of KV, in threads that nobody waits for."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from sglang_coserve.lines.task_supervisor import TaskSupervisor
from sglang_coserve.srt.kv_checkpoint.kv_directory import KvFileError

__all__ = ["KvJob", "KvThreads"]

_THREADS: Final = 2
"""One may copy and check while the other waits for the disk."""

_logger = logging.getLogger(__name__)


class KvJob:
    """Work that is under way, and may be given up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_given_up = False
        self.has_succeeded: bool | None = None
        """None until it has ended."""

    @property
    def is_given_up(self) -> bool:
        """Whether nobody wants the result any more."""
        return self._is_given_up

    def give_up(self) -> None:
        """Let the result be nobody's; memory that was lent to the job is free afterwards."""
        with self._lock:
            self._is_given_up = True

    def with_memory(self, copy: Callable[[], None]) -> bool:
        """Call ``copy``, which uses memory that was lent to the job; False if it was given up.

        ``copy`` must not wait for a disk: ``give_up`` waits for it.
        """
        with self._lock:
            if self._is_given_up:
                return False
            copy()
        return True


class KvThreads:
    """Threads that end with the process, however long a disk hangs."""

    def __init__(
        self, background: TaskSupervisor, regularly: Callable[[], None], interval_s: float
    ) -> None:
        """``regularly`` is called at once, and then again after ``interval_s``."""
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._regularly = regularly
        self._interval_s = interval_s
        for _ in range(_THREADS):
            background.start_thread("kv_moves", self._run)
        background.start_thread("kv_expiry", self._run_regularly)

    def begin(self, work: Callable[[KvJob], None]) -> KvJob:
        """Call ``work`` in a thread; if it raises, the job has failed."""
        job = KvJob()

        def attempt() -> None:
            has_succeeded = False
            try:
                if not job.is_given_up:
                    work(job)
                    has_succeeded = True
            except KvFileError as error:
                _logger.warning("KV is computed again: %s", error)
            except Exception as error:
                _logger.warning("KV is not moved: %s: %s", type(error).__name__, error)
            job.has_succeeded = has_succeeded

        self._work.put(attempt)
        return job

    def _run(self) -> None:
        while True:
            self._work.get()()

    def _run_regularly(self) -> None:
        while True:
            self._regularly()
            time.sleep(self._interval_s)
