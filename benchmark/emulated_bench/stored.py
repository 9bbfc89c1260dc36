"""The figures of one load in a file, to which further runs are added."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from common.results import write_results
from emulated_bench.contenders import PLAIN, targets_of_alone
from sglang_coserve.errors import ConfigError
from sglang_coserve.metrics import SloTargets

Row = dict[str, Any]


@dataclass(slots=True)
class StoredLoad:
    """The rows of one load, one for each system and repeat."""

    path: Path
    head: Mapping[str, Any]
    """Fields that describe the load."""

    rows: list[Row] = field(default_factory=list)

    @classmethod
    def opened(cls, path: Path, head: Mapping[str, Any]) -> Self:
        """Read the stored rows.

        Raises:
            ConfigError: the rows are of another load.
        """
        plain = json.loads(json.dumps(head))
        if not path.exists():
            return cls(path, plain)
        stored = json.loads(path.read_text())
        if differing := [name for name in plain if stored.get(name) != plain[name]]:
            raise ConfigError(
                f"{path} holds runs with another {', '.join(differing)}: choose another --out, or "
                "remove the file"
            )
        return cls(path, plain, stored["rows"])

    def has(self, system: str, repeat: int) -> bool:
        """Return whether there is a row."""
        return self.row(system, repeat) is not None

    def row(self, system: str, repeat: int) -> Row | None:
        """Return a row; None if there is none."""
        return next((r for r in self.rows if (r["system"], r["repeat"]) == (system, repeat)), None)

    def targets_of_alone(self, repeat: int) -> SloTargets | None:
        """Return the targets that online requests alone give; None without their row."""
        row = self.row(PLAIN, repeat)
        return None if row is None else targets_of_alone(row)

    def add(self, row: Row, options: Any) -> None:
        """Add a row, and write the file."""
        self.rows.append(row)
        self.write(options)

    def forget(self, systems: Iterable[str]) -> int:
        """Remove the rows of some systems; return the number of rows."""
        forgotten = set(systems)
        kept = [row for row in self.rows if row["system"] not in forgotten]
        count = len(self.rows) - len(kept)
        self.rows = kept
        return count

    def write(self, options: Any) -> None:
        """Write the file, with the options of the command."""
        write_results(self.path, options, **self.head, rows=self.rows)
