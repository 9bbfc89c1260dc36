"""Writes scheduling decisions to disk (``--record-plans``)."""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from itertools import count
from pathlib import Path
from typing import BinaryIO, Final

from sglang_coserve.core.advisory import Advisory
from sglang_coserve.errors import ConfigError
from sglang_coserve.recording.calls import RecordedStep, RecordingScheduler, SchedulerSetup
from sglang_coserve.recording.file import encode_setup, encode_step

_MAX_BYTES: Final = 1 << 30

logger = logging.getLogger(__name__)


def recorded(
    setup: SchedulerSetup,
    path: str | Path,
    advisory: Advisory | None = None,
    *,
    max_bytes: int = _MAX_BYTES,
) -> RecordingScheduler:
    """Return a scheduler made from ``setup`` that records its steps in ``path``.

    To be used on one rank only, as the others decide alike. ``advisory`` calls what judges, learns
    and records.

    Raises:
        ConfigError: the file cannot be opened.
    """
    log = PlanLog(Path(path), setup, max_bytes=max_bytes)
    advisory = advisory or Advisory()
    append = partial(advisory.tell, "recording", log.append)
    return RecordingScheduler(setup.make(advisory=advisory), append)


def _begin(path: Path) -> tuple[Path, BinaryIO]:
    for number in count():
        numbered = path.with_stem(f"{path.stem}.{number}") if number else path
        try:
            # A pipe or a device is opened as it is.
            if numbered.is_file() or not numbered.exists():
                # It contains prompts: only the owner may read it, whatever the umask.
                numbered.touch(mode=0o600, exist_ok=False)
            return numbered, numbered.open("wb")
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(
                f"--record-plans {path}: cannot be written: {error.strerror}: name another file"
            ) from error
    raise AssertionError("there are always more numbers")


class PlanLog:
    """Appends steps to a new file, one per line, up to a maximum size.

    Errors do not stop serving: when a line cannot be written, or would make the
    file longer than ``max_bytes``, this is logged once and nothing more is written. Lines
    are handed to the operating system at once, so they survive the end of the process.
    """

    def __init__(self, path: Path, setup: SchedulerSetup, *, max_bytes: int) -> None:
        """Create the file; if it exists, one with the next free number in its name.

        So a restart does not overwrite earlier recordings, and replicas do not share a file.

        Raises:
            ConfigError: the file cannot be opened.
        """
        self._left_bytes = max_bytes
        self._path, self._file = _begin(path)
        self._write(encode_setup(setup))

    def append(self, step: RecordedStep) -> None:
        """Write a step. O(requests)."""
        if not self._file.closed:
            self._write(encode_step(step))

    def _write(self, line: bytes) -> None:
        self._left_bytes -= len(line)
        if self._left_bytes < 0:
            self._stop("it has reached its greatest length")
            return
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            self._stop(f"{error.strerror}")

    def _stop(self, reason: str) -> None:
        logger.warning("--record-plans %s: %s: recording ends here", self._path, reason)
        # Closing tries once more to write what is still in the buffer.
        with contextlib.suppress(OSError):
            self._file.close()
