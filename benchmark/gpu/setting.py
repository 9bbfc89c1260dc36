"""What all steps of one folder have in common."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from gpu.record import read_json, write_text

__all__ = ["DRY_RUN_NOTE", "Setting"]

DRY_RUN_NOTE: Final = (
    "Dry run on a CPU with a tiny model: no figure here says anything about a GPU."
)


@dataclass(frozen=True, slots=True)
class Setting:
    """How servers are started; the same for every system that is compared."""

    dry_run: bool = False
    """On this CPU, with a tiny model and tiny counts, to find faults."""

    model_path: str | None = None
    """None: the shape of Llama-3.1-8B with dummy weights; in a dry run a tiny model."""

    load_format: str = "dummy"
    attention_backend: str = "flashinfer"
    sampling_backend: str = "pytorch"
    server_flags: tuple[str, ...] = ()
    """More flags for every server."""

    def claim(self, path: Path) -> None:
        """Let a folder hold figures of one setting only.

        Raises:
            ValueError: the folder holds figures of another one.
        """
        mine = json.loads(json.dumps(asdict(self)))
        found = read_json(path)
        differing = [name for name in mine if found is not None and found.get(name) != mine[name]]
        if differing:
            raise ValueError(
                f"{path.parent} holds figures with another {', '.join(differing)}: choose another "
                "--out, or remove it"
            )
        write_text(path, json.dumps(mine, indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Setting:
        """Return what ``claim`` wrote."""
        fields = read_json(path)
        assert fields is not None, f"{path} is the driver's to write"
        return cls(**{**fields, "server_flags": tuple(fields["server_flags"])})
