"""Figures as JSON files, with the command and the machine that gave them."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.machine import describe_machine
from sglang_coserve.durable_files import replace
from sglang_coserve.errors import ConfigError


def settings_of(options: Any) -> dict[str, Any]:
    """Return a command line's options, but for ``out``, as JSON values."""
    values = vars(options) if isinstance(options, Namespace) else asdict(options)
    given = {name: value for name, value in values.items() if name != "out"}
    plain: dict[str, Any] = json.loads(json.dumps(given, default=_text))
    return plain


def recorded_command(words: Sequence[str]) -> str:
    """Return a command line for results, with the last part of each absolute path.

    Folders of one machine mean nothing on another one.
    """
    return shlex.join([Path(word).name if word.startswith("/") else word for word in words])


def _text(value: object) -> str:
    return value.name if isinstance(value, Path) and value.is_absolute() else str(value)


def claim_folder(path: Path, settings: Mapping[str, Any]) -> None:
    """Let a folder hold figures of one setting only: ``path`` in it says which.

    Raises:
        ConfigError: the folder holds figures of another one.
    """
    if path.exists():
        earlier = json.loads(path.read_text())
        differing = [name for name in settings if settings[name] != earlier.get(name)]
        if differing:
            raise ConfigError(
                f"{path.parent} holds runs with another {', '.join(differing)}: choose another "
                "--out, or remove it"
            )
    write_json(path, settings)


def write_results(path: Path | None, options: Any, **figures: Any) -> None:
    """Write figures with the command, the machine and the settings; nothing without a path."""
    if path is not None:
        command = recorded_command(["python", *sys.argv])
        record = {"command": command, "machine": describe_machine()}
        write_json(path, {**record, "settings": settings_of(options), **figures})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file so that a reader sees all of it or the former one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    replace(path, lambda file: file.write(content.encode()), 0o666)
