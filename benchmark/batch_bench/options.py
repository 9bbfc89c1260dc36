"""The command line."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sglang_coserve.errors import ConfigError

__all__ = ["PARTS", "Options", "parse_options"]

PARTS: Final = ("validate", "first-request", "overhead", "upload-online", "memory", "crashes")
_FULL_LINES, _FULL_MB = 1_000_000, 2000


@dataclass(frozen=True, slots=True)
class Options:
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
    crashes: int
    crash_lines: int
    crash_up_s: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and field.name != "seed" and not value > 0:
                flag = field.name.removesuffix("_s").removesuffix("_per").replace("_", "-")
                raise ConfigError(f"--{flag} must be greater than 0")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        fields = dataclasses.asdict(self)
        return {name: _plain(value) for name, value in fields.items()}


def parse_options(argv: Sequence[str]) -> Options:
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
        ("crashes", 10, 2),
        ("crash_lines", 300, 40),
    ):
        if getattr(flags, name) is None:
            setattr(flags, name, quick if flags.quick else default)
    return Options(
        out=flags.out,
        parts=tuple(part for part in PARTS if part in flags.parts),
        repeats=flags.repeats,
        seed=flags.seed,
        model_path=flags.model_path,
        server_flags=tuple(shlex.split(flags.server_flags)),
        ready_timeout_s=flags.ready_timeout,
        validate_lines=flags.validate_lines,
        overhead_lines=flags.overhead_lines,
        online_rate_per_s=flags.online_rate,
        online_window_s=flags.online_window,
        upload_mb=flags.upload_mb,
        upload_lines=flags.upload_lines,
        memory_mb=flags.memory_mb,
        memory_lines=flags.memory_lines,
        serve_s=flags.serve,
        crashes=flags.crashes,
        crash_lines=flags.crash_lines,
        crash_up_s=flags.crash_up,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measures the Batch API of a real server.")
    add = parser.add_argument
    add("--out", type=Path, default=Path("bench-batch-api"), help="where everything goes")
    add("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    add("--quick", action="store_true", help="a smoke run: small files, one repeat")
    add("--full", action="store_true", help="memory: 1,000,000 lines of 2 GB instead of 200 MB")
    add("--repeats", type=int, help="of every part but memory and crashes (default: 5)")
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
    add("--crashes", type=int, help="times that the server is killed (default: 10)")
    add("--crash-lines", type=int, help="of a batch that is then under way (default: 300)")
    add("--crash-up", type=float, default=3.0, metavar="S", help="longest time before a kill")
    return parser
