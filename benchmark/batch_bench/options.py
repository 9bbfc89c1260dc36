"""The command line."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.results import taken_from
from sglang_coserve.errors import ConfigError

__all__ = ["PARTS", "BatchBenchOptions", "parse_options"]

PARTS: Final = ("validate", "first-request", "overhead", "upload-online", "memory")
_FLAGS: Final = {
    "online_rate_per_s": "online_rate",
    "online_window_s": "online_window",
    "serve_s": "serve",
    "ready_timeout_s": "ready_timeout",
}
"""Fields of ``BatchBenchOptions`` whose flags lack the unit."""

_FULL_LINES, _FULL_MB = 1_000_000, 2000


@dataclass(frozen=True, slots=True)
class BatchBenchOptions:
    """What to measure. ``parse_options`` documents every field as a flag."""

    out: Path
    parts: tuple[str, ...]
    repeats: int
    seed: int
    model_path: str | None
    server_flags: tuple[str, ...]
    ready_timeout_s: float
    validate_lines: int
    overhead_lines: int
    online_rate_per_s: float
    online_window_s: float
    upload_mb: int
    upload_lines: int
    memory_mb: int
    memory_lines: int
    serve_s: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and field.name != "seed" and not value > 0:
                flag = field.name.removesuffix("_s").removesuffix("_per").replace("_", "-")
                raise ConfigError(f"--{flag} must be greater than 0")


def parse_options(argv: Sequence[str]) -> BatchBenchOptions:
    """Read the command line.

    Raises:
        ConfigError: a value is out of range.
        SystemExit: argparse refused the command line, or printed its help.
    """
    flags = _parser().parse_args(argv)
    # What was not said depends on how long it may take.
    for name, default, quick in (
        ("repeats", 5, 1),
        ("validate_lines", 200_000, 20_000),
        ("overhead_lines", 600, 60),
        ("online_window", 40.0, 8.0),
        ("upload_mb", 200, 20),
        ("upload_lines", 50_000, 5_000),
        ("memory_mb", _FULL_MB if flags.full else 200, 20),
        ("memory_lines", _FULL_LINES if flags.full else 100_000, 10_000),
        ("serve", 15.0, 2.0),
    ):
        if getattr(flags, name) is None:
            setattr(flags, name, quick if flags.quick else default)
    flags.parts = tuple(part for part in PARTS if part in flags.parts)
    flags.server_flags = tuple(shlex.split(flags.server_flags))
    return taken_from(flags, BatchBenchOptions, _FLAGS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measures the Batch API of a real server.")
    add = parser.add_argument
    add("--out", type=Path, default=Path("bench-batch-api"), help="where everything goes")
    add("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    add("--quick", action="store_true", help="a smoke run: small files, one repeat")
    add("--full", action="store_true", help="memory: 1,000,000 lines of 2 GB instead of 200 MB")
    add("--repeats", type=int, help="of every part but memory (default: 5)")
    add("--seed", type=int, default=1)

    group = parser.add_argument_group("servers")
    add = group.add_argument
    add("--model-path", help="default: a random model of 4 layers, hidden size 256, fp32")
    add("--server-flags", default="", metavar="'FLAGS'", help="for every server alike")
    add("--ready-timeout", type=float, default=300.0, metavar="S")

    group = parser.add_argument_group("parts")
    add = group.add_argument
    add("--validate-lines", type=int, help="of 500 bytes (default: 200000)")
    add("--overhead-lines", type=int, help="of 64 prompt and 32 output tokens (default: 600)")
    add("--online-rate", type=float, default=4.0, metavar="RPS", help="beside the uploads")
    add("--online-window", type=float, metavar="S", help="how long they arrive (default: 40)")
    add("--upload-mb", type=int, help="file uploaded beside online requests (default: 200)")
    add("--upload-lines", type=int, help="its lines (default: 50000)")
    add("--memory-mb", type=int, help="file whose memory is watched (default: 200)")
    add("--memory-lines", type=int, help="its lines (default: 100000)")
    add("--serve", type=float, metavar="S", help="how long it is then served (default: 15)")
    return parser
