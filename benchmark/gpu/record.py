"""What became of a step, on disk; the files from which a later run goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

__all__ = ["Status", "StepRecord", "read_json", "write_text"]


class Status(Enum):
    """How the last attempt ended."""

    DONE = "done"
    """Everything is measured; a later run skips the step."""

    PARTIAL = "partial"
    """Stopped by the time or by Ctrl-C; what it measured is kept, and it can go on."""

    REFUSED = "refused"
    """It cannot be measured here; ``problem`` says why."""

    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """``DIR/STEP.json``."""

    step: str
    question: str
    status: Status
    attempts: int
    seconds: float
    """Of all attempts."""

    dry_run: bool
    """On a CPU, with a tiny model: to find faults. No figure means anything."""

    command: str
    """Of the run that made the last attempt."""

    problem: str = ""
    log_tail: tuple[str, ...] = ()
    """The end of the log of an attempt that failed."""

    measured: Mapping[str, Any] = field(default_factory=dict)
    """What the step reported: ``machine``, ``figures``, ``tables``."""

    def write(self, path: Path) -> None:
        """Write the record; a reader sees all of it or the former one."""
        fields = {**asdict(self), "status": self.status.value}
        write_text(path, json.dumps(fields, indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> StepRecord | None:
        """Return what ``write`` wrote; None where there is no whole file."""
        fields = read_json(path)
        if fields is None:
            return None
        fields |= {"status": Status(fields["status"]), "log_tail": tuple(fields["log_tail"])}
        return cls(**fields)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file; None where there is none."""
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return fields


def write_text(path: Path, text: str) -> None:
    """Replace a file as a whole."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)
