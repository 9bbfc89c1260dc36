"""Measurements on disk, a line each, so that a profile can be continued."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from sglang_coserve.core.latency_model.json_object import JsonObject
from sglang_coserve.errors import ConfigError, InputFileError
from sglang_coserve.profiler.executor import BatchShape
from sglang_coserve.profiler.machine import Machine
from sglang_coserve.profiler.measurement import Measurement

__all__ = ["SampleFile"]

_SCHEMA_VERSION: Final = 1


class SampleFile:
    """A JSONL file: the machine on the first line, then a measurement a line.

    A context that closes the file. Lines are written as measurements come; a
    last line that an interruption cut short is dropped when reading.
    """

    def __init__(self, path: Path, machine: Machine, *, resume: bool) -> None:
        """Open the file for appending, a new one unless ``resume``.

        Raises:
            ConfigError: the file exists and is not to be continued.
            InputFileError: it cannot be read, or was measured on another machine.
        """
        self.measurements: list[Measurement] = []
        """What the file holds, in order."""

        exists = path.exists()
        if exists and not resume:
            raise ConfigError(f"{path}: measurements exist: add --resume, or remove the file")
        header = {"schema_version": _SCHEMA_VERSION, **machine.to_json()}
        # Through JSON, as a list and a tuple are the same there.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def append(self, measurement: Measurement) -> None:
        """Add a measurement; it is in the file when this returns."""
        shape = measurement.shape
        self._write(
            {
                "prefill_tokens": [tokens for tokens, _ in shape.prefills],
                "prefill_contexts": [context for _, context in shape.prefills],
                "decodes": shape.decodes,
                "runs_s": measurement.runs_s,
            }
        )
        self.measurements.append(measurement)

    def _write(self, fields: dict[str, object]) -> None:
        self._file.write(json.dumps(fields) + "\n")
        self._file.flush()


def _read(path: Path) -> tuple[JsonObject, list[Measurement], int]:
    """Return the header, the measurements, and the length in bytes of the whole lines."""
    text = path.read_bytes()
    length = text.rfind(b"\n") + 1
    lines = text[:length].decode("utf-8", errors="replace").splitlines()
    if not lines:
        raise InputFileError(f"{path}: not even a first line: remove the file")
    header = JsonObject.parse(lines[0], f"{path}:1")
    measurements = [
        _measurement(JsonObject.parse(line, f"{path}:{number}"))
        for number, line in enumerate(lines[1:], start=2)
    ]
    return header, measurements, length


def _reject_other_machine(path: Path, expected: dict[str, object], found: JsonObject) -> None:
    for name, value in expected.items():
        if found.fields.get(name) != value:
            raise InputFileError(
                f"{path}: {name} was {found.fields.get(name)!r:.200}, now it is {value!r:.200}: "
                "measurements of both do not belong together; use another output"
            )


def _measurement(fields: JsonObject) -> Measurement:
    tokens = fields.integers("prefill_tokens", minimum=1)
    contexts = fields.integers("prefill_contexts", minimum=0)
    decodes = fields.integers("decodes", minimum=1)
    runs_s = tuple(_seconds(fields, value) for value in _list(fields, "runs_s"))
    if len(tokens) != len(contexts):
        fields.fail("prefill_contexts", f"{len(contexts)} values for {len(tokens)} prefills")
    if not runs_s or not (tokens or decodes):
        fields.fail("runs_s", "a measurement has at least one row and one run: remove the line")
    return Measurement(BatchShape(tuple(zip(tokens, contexts, strict=True)), decodes), runs_s)


def _list(fields: JsonObject, name: str) -> list[object]:
    value = fields.fields.get(name)
    if not isinstance(value, list):
        fields.fail(name, f"expected a list, found {value!r:.40}")
    return value


def _seconds(fields: JsonObject, value: object) -> float:
    if not isinstance(value, float) or not 0 < value < math.inf:
        fields.fail("runs_s", f"expected positive numbers, found {value!r:.40}")
    return value
