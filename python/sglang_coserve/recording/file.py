"""Recordings as JSON lines: what ``--record-plans`` writes.

Line 1 describes the ``SchedulerSetup``; every other line is a ``RecordedStep``, encoded by the
types of its values: a named tuple is an array, a dataclass an object.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any, Final, TypeVar

import msgspec

from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.control.slo import Slo
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.step import StepPlan
from sglang_coserve.errors import CoserveError, InputFileError
from sglang_coserve.latency_profile import LatencyProfile
from sglang_coserve.recording.calls import RecordedStep, SchedulerSetup

T = TypeVar("T")

FORMAT: Final = "coserve plans"
VERSION: Final = 19

_STEPS: Final = msgspec.json.Decoder(RecordedStep)
_PLAN_FIELDS: Final = tuple(field.name for field in fields(StepPlan))

logger = logging.getLogger(__name__)


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line."""

    format: str
    version: int
    policy: str
    policy_settings: dict[str, int | float]
    slos: tuple[Slo, ...]
    engine: EngineSize
    config: SchedulerConfig
    profile: dict[str, Any]
    """The JSON object written by ``LatencyProfile.to_json``."""


def encode_setup(setup: SchedulerSetup) -> bytes:
    """Return the first line of a recording."""
    profile = msgspec.json.decode(setup.profile.to_json())
    header = _Header(
        FORMAT,
        VERSION,
        setup.policy,
        dict(setup.policy_settings),
        setup.slos,
        setup.engine,
        setup.config,
        profile,
    )
    return msgspec.json.encode(header) + b"\n"


def encode_step(step: RecordedStep) -> bytes:
    """Return the line of a step. O(requests)."""
    line: dict[str, Any] = {"calls": step.calls}
    if (planned := step.planned) is not None:
        # JSON has no infinity. Infinite fields are left out: infinity is their default.
        plan = {
            name: value
            for name in _PLAN_FIELDS
            if (value := getattr(planned.plan, name)) != math.inf
        }
        line["planned"] = {
            "snapshot": planned.snapshot,
            "cached_tokens": planned.cached_tokens,
            "plan": plan,
        }
    return msgspec.json.encode(line) + b"\n"


def read_recording(
    lines: Iterable[bytes], source: str
) -> tuple[SchedulerSetup, Iterator[RecordedStep]]:
    """Read a recording; the steps are decoded lazily.

    A last line without a line feed is left out, with a warning in the log: the recording process
    has ended while it wrote.

    Raises:
        InputFileError: a line is malformed; raised at once for the first line, for others
            when the iterator reaches them. The message starts with ``source:number``.
    """
    numbered = enumerate(lines, start=1)
    _, first = next(numbered, (0, b""))
    if not first.endswith(b"\n"):
        raise InputFileError(f"{source}: nothing is recorded in it")
    return _read(_setup, f"{source}:1", first), _steps(numbered, source)


def _steps(numbered: Iterable[tuple[int, bytes]], source: str) -> Iterator[RecordedStep]:
    for number, line in numbered:
        if not line.endswith(b"\n"):
            logger.warning("%s:%d: the last line is cut off, and is left out", source, number)
            return
        yield _read(_STEPS.decode, f"{source}:{number}", line)


def _setup(line: bytes) -> SchedulerSetup:
    values = msgspec.json.decode(line, type=dict[str, Any])
    if values.get("format") != FORMAT:
        raise InputFileError(f"format: expected {FORMAT!r}, which --record-plans writes")
    if values.get("version") != VERSION:
        raise InputFileError(
            f"version: {values.get('version')!r:.40} is not {VERSION}, which this version reads: "
            "replay it with the version of sglang_coserve that recorded it, or record again"
        )
    header = msgspec.convert(values, _Header)
    profile = msgspec.json.encode(header.profile).decode()
    return SchedulerSetup(
        header.policy,
        header.slos,
        header.config,
        LatencyProfile.from_json(profile, "profile"),
        header.engine,
        header.policy_settings,
    )


def _read(decode: Callable[[bytes], T], source: str, line: bytes) -> T:
    """Return the decoded line; errors name the line."""
    try:
        return decode(line)
    except msgspec.ValidationError as error:
        raise InputFileError(f"{source}: {_said(error)}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputFileError(f"{source}: not valid JSON: {error}") from error
    except (AssertionError, CoserveError, ValueError) as error:
        raise InputFileError(f"{source}: {error}") from error


def _said(error: msgspec.ValidationError) -> str:
    """Return the field, and what is wrong with it."""
    problem, _, field = str(error).partition(" - at `$")
    field = field.rstrip("`").lstrip(".")
    return f"{field}: {problem}" if field else problem
