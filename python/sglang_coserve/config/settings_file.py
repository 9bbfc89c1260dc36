"""Settings of servers from one file and from the environment; what the command line says wins.

One TOML file may be for engines and gateways: tables [serve] and [gateway] are read by one command,
what is above them by both. Names are those of flags. An environment variable is such a name, too:
COSERVE_PORT, COSERVE_DATA_DIR; it wins over the file. Several values are a list in the file, and
separated by spaces in a variable.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sglang_coserve.config.flags import FlagParser
from sglang_coserve.errors import ConfigError, unreadable

_PREFIX: Final = "COSERVE_"
_OWN: Final = "coserve_"
"""Left out of names: --coserve-data-dir is data_dir, and COSERVE_DATA_DIR."""

_LINK: Final = re.compile(r"(tcp|udp|sctp)://")
"""How the address of a Service begins. Beside one called coserve Kubernetes sets COSERVE_PORT to it
in each container of the namespace; no port is meant."""

_SWITCHES: Final = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("0", "false", "no", "off"), False
)
_TABLES: Final = ("serve", "gateway")


class Settings:
    """What the environment, a file and the command line say to a command.

    The file is that of ``--settings``, or of the variable COSERVE_SETTINGS. It is read once, for it
    may be a pipe.
    """

    def __init__(self, argv: Sequence[str], table: str) -> None:
        """``argv`` is the command line without the program's name; ``table`` is that of the command
        in the file.

        Raises:
            ConfigError: the file cannot be read.
        """
        parser = FlagParser(add_help=False)
        parser.add_argument("--settings", default=os.environ.get(f"{_PREFIX}SETTINGS"))
        chosen, self._rest = parser.parse_known_args(list(argv))
        self._file: str | None = chosen.settings
        self._in_file = _read(Path(self._file), table) if self._file else {}

    def one(self, name: str) -> str | None:
        """Return a setting of environment or file, before the command's flags are known; None if
        there is none."""
        value = _in_environment(name) or self._in_file.get(name)
        return None if value is None else str(value)

    def command_line(self, parser: argparse.ArgumentParser) -> list[str]:
        """Return the command line, with what environment and file add in front of it.

        A flag that may be given several times is not added where the command line has it.
        ``parser`` knows all flags of the command.

        Raises:
            ConfigError: a name or value in the file or the environment is unknown or wrong.
        """
        given = {word.partition("=")[0] for word in self._rest}
        actions = dict(_settable(parser._actions))
        for name in self._in_file:
            if name not in actions:
                near = difflib.get_close_matches(name, actions, 1)
                hint = f": did you mean {near[0]}?" if near else ""
                raise ConfigError(f"{self._file}: there is no setting {name!r}{hint}")
        flags: list[str] = []
        for name, action in actions.items():
            variable = f"{_PREFIX}{name.upper()}"
            if not given.isdisjoint(action.option_strings):
                continue
            if found := _in_environment(name):
                value = _parts(found, variable) if _takes_several(action) else found
                flags += _flags(action, value, variable)
            elif name in self._in_file:
                flags += _flags(action, self._in_file[name], f"{self._file}: {name}")
        return [*flags, *self._rest]


def _in_environment(name: str) -> str | None:
    value = os.environ.get(f"{_PREFIX}{name.upper()}")
    is_link = name.endswith("port") and value is not None and _LINK.match(value)
    return None if is_link else value


def _settable(actions: Iterable[argparse.Action]) -> Iterator[tuple[str, argparse.Action]]:
    for action in actions:
        is_help = action.default is argparse.SUPPRESS or action.dest in (
            "help",
            "config",
            "settings",
        )
        if action.option_strings and not is_help:
            yield action.dest.removeprefix(_OWN), action


def _read(path: Path, table: str) -> Mapping[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(unreadable(path, error)) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    shared = {name: value for name, value in content.items() if name not in _TABLES}
    own = content.get(table, {})
    if not isinstance(own, dict):
        raise ConfigError(f"{path}: {table} is a table, [{table}]")
    return {
        name.replace("-", "_").removeprefix(_OWN): value
        for name, value in {**shared, **own}.items()
    }


def _takes_several(action: argparse.Action) -> bool:
    return action.nargs in ("+", "*") or isinstance(action, argparse._AppendAction)


def _parts(text: str, where: str) -> list[str]:
    """Return the values of a variable, which spaces separate; within single quotes they do not."""
    parts = shlex.shlex(text, posix=True)
    parts.whitespace_split = True
    # Double quotes and backslashes belong to values that are JSON.
    parts.quotes, parts.escape, parts.commenters = "'", "", ""
    try:
        return list(parts)
    except ValueError as error:
        raise ConfigError(f"{where}: {text!r} has a single quote without its partner") from error


def _flags(action: argparse.Action, value: Any, where: str) -> list[str]:
    """Return a setting as words of a command line; a text is one value, a list is several."""
    flag = max(action.option_strings, key=len)
    if action.nargs == 0:
        is_on = _SWITCHES.get(str(value).lower())
        if is_on is None:
            raise ConfigError(f"{where} is true or false, not {value!r}")
        if isinstance(action, argparse.BooleanOptionalAction):
            return [each for each in action.option_strings if each.startswith("--no-") != is_on]
        return [flag] if is_on else []
    values = value if isinstance(value, list) else [value]
    words = [str(each) for each in values if type(each) in (str, int, float)]
    if len(words) < len(values) or (len(words) != 1 and not _takes_several(action)):
        raise ConfigError(f"{where} cannot be {value!r}")
    if action.nargs in ("+", "*"):
        return [flag, *words]
    return [f"{flag}={word}" for word in words]
