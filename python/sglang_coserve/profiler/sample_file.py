"""Stores measurements on disk, one per line, so that profiling can be continued."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from sglang_coserve.core.validation import JsonDocument, read_json
from sglang_coserve.errors import ConfigError, InputFileError
from sglang_coserve.profiler.executor import StepShape
from sglang_coserve.profiler.latency import ShapeTiming
from sglang_coserve.profiler.profile_file import ProfiledMachine

__all__ = ["SampleFile"]

_SCHEMA_VERSION: Final = 1


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
        expected = json.loads(json.dumps(header))
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
        self._write(_SampleLine.of(measurement).model_dump())
        self.measurements.append(measurement)

    def _write(self, fields: dict[str, Any]) -> None:
        self._file.write(json.dumps(fields) + "\n")
        self._file.flush()


class _SampleLine(JsonDocument):
    """A measurement as stored in the file."""

    prefill_tokens: tuple[PositiveInt, ...]
    prefill_contexts: tuple[NonNegativeInt, ...]
    decodes: tuple[PositiveInt, ...]
    runs_s: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]

    @classmethod
    def of(cls, measurement: ShapeTiming) -> _SampleLine:
        """Return the line of a measurement."""
        shape = measurement.shape
        return cls(
            prefill_tokens=tuple(tokens for tokens, _ in shape.prefills),
            prefill_contexts=tuple(context for _, context in shape.prefills),
            decodes=shape.decodes,
            runs_s=measurement.runs_s,
        )

    def measurement(self, source: str) -> ShapeTiming:
        """Return the measurement; ``source`` names the line in messages."""
        tokens, contexts = self.prefill_tokens, self.prefill_contexts
        if len(tokens) != len(contexts):
            raise InputFileError(
                f"{source}: prefill_contexts: {len(contexts)} values for {len(tokens)} prefills"
            )
        if not (tokens or self.decodes):
            raise InputFileError(
                f"{source}: a measurement has at least one request: remove the line"
            )
        prefills = tuple(zip(tokens, contexts, strict=True))
        return ShapeTiming(StepShape(prefills, self.decodes), self.runs_s)


def _read(path: Path) -> tuple[dict[str, Any], list[ShapeTiming], int]:
    """Return the header, the measurements, and the size in bytes of all complete lines."""
    text = path.read_bytes()
    length = text.rfind(b"\n") + 1
    lines = text[:length].splitlines()
    if not lines:
        raise InputFileError(f"{path}: not even a first line: remove the file")
    header = read_json(dict[str, Any], lines[0], f"{path}:1")
    measurements = []
    for number, line in enumerate(lines[1:], start=2):
        source = f"{path}:{number}"
        measurements.append(read_json(_SampleLine, line, source).measurement(source))
    return header, measurements, length


def _reject_other_machine(path: Path, expected: dict[str, Any], found: dict[str, Any]) -> None:
    for name, value in expected.items():
        if found.get(name) != value:
            raise InputFileError(
                f"{path}: {name} was {found.get(name)!r:.200}, now it is {value!r:.200}: "
                "measurements of both do not belong together; use another output"
            )
