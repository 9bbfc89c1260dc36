"""Stores measurements on disk, one per line, so that profiling can be continued."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import msgspec

from sglang_coserve.errors import ConfigError, InputFileError
from sglang_coserve.profiler.latency import ShapeTiming
from sglang_coserve.profiler.profile_file import ProfiledMachine

_SCHEMA_VERSION: Final = 2

T = TypeVar("T")


class SampleFile:
    """A JSONL file: the machine on the first line, then one measurement per line.

    A context manager that closes the file. Each measurement is written at once, but not synced:
    it can be measured again. A last line that an interruption cut short is ignored when reading.
    """

    def __init__(self, path: Path, machine: ProfiledMachine, *, resume: bool) -> None:
        """Open the file for appending; create it unless ``resume``.

        Raises:
            ConfigError: the file exists, without ``resume``.
            InputFileError: it cannot be read, or was measured on another machine.
        """
        self.measurements: list[ShapeTiming] = []
        """The measurements in the file, in order."""

        exists = path.exists()
        if exists and not resume:
            raise ConfigError(f"{path}: measurements exist: add --resume, or remove the file")
        header = {"schema_version": _SCHEMA_VERSION, **asdict(machine)}
        # Through JSON, which turns tuples into lists.
        expected = msgspec.json.decode(msgspec.json.encode(header))
        if exists:
            found, self.measurements, length = _read(path)
            _reject_other_machine(path, expected, found)
            with path.open("r+b") as file:
                file.truncate(length)
        self._file = path.open("a", encoding="utf-8")
        if not exists:
            self._write(expected)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def append(self, measurement: ShapeTiming) -> None:
        """Append a measurement; it has been written when this returns."""
        self._write(measurement)
        self.measurements.append(measurement)

    def _write(self, line: object) -> None:
        self._file.write(msgspec.json.encode(line).decode() + "\n")
        self._file.flush()


def _read(path: Path) -> tuple[dict[str, Any], list[ShapeTiming], int]:
    """Return the header, the measurements, and the size in bytes of all complete lines."""
    text = path.read_bytes()
    length = text.rfind(b"\n") + 1
    lines = text[:length].splitlines()
    if not lines:
        raise InputFileError(f"{path}: not even a first line: remove the file")
    header = _decode(lines[0], dict[str, Any], f"{path}:1")
    measurements = [
        _decode(line, ShapeTiming, f"{path}:{number}")
        for number, line in enumerate(lines[1:], start=2)
    ]
    return header, measurements, length


def _decode(line: bytes, kind: type[T], source: str) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, AssertionError) as error:
        raise InputFileError(f"{source}: {error}: remove the line") from error


def _reject_other_machine(path: Path, expected: dict[str, Any], found: dict[str, Any]) -> None:
    for name, value in expected.items():
        if found.get(name) != value:
            raise InputFileError(
                f"{path}: {name} was {found.get(name)!r:.200}, now it is {value!r:.200}: "
                "measurements of both do not belong together; use another output"
            )
