"""Settings of servers from a file and from the environment; what the command line says wins.

The file is YAML, as SGLang's ``--config`` is: names of flags and their values. An environment
variable is such a name, too: COSERVE_PORT, COSERVE_DATA_DIR; it wins over the file. Several values
are a list in the file, and separated by spaces in a variable.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import yaml

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


class Settings:
    """Settings of a command, from the environment, a file and the command line.

    ``--config`` names the file, or else the variable COSERVE_CONFIG. The file is read once, since
    it may be a pipe.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        """``argv`` is the command line without the program's name.

        Raises:
            ConfigError: the file cannot be read.
        """
        parser = FlagParser(add_help=False)
        parser.add_argument("--config", action="append")
        chosen, self._rest = parser.parse_known_args(list(argv))
        named = chosen.config or [os.environ.get(f"{_PREFIX}CONFIG")]
        if len(named) > 1:
            raise ConfigError(f"--config is given {len(named)} times: name one file")
        self._file: str | None = named[0]
        self._in_file = _read(Path(self._file)) if self._file else {}

    def one(self, name: str, *others: str) -> str | None:
        """Return a setting of environment or file, before the command's flags are known; None if
        there is none. ``others`` are other spellings of the flag in a file."""
        in_file = (self._in_file.get(each) for each in (name, *others))
        found = [_in_environment(name), *in_file]
        return next((str(value) for value in found if value is not None), None)

    def command_line(self, parser: argparse.ArgumentParser) -> list[str]:
        """Return the command line, with what environment and file add in front of it.

        A flag that may be given several times is not added where the command line has it.
        ``parser`` knows all flags of the command.

        Raises:
            ConfigError: a name or value in the file or the environment is unknown or wrong.
        """
        given = {word.partition("=")[0] for word in self._rest}
        in_file: dict[argparse.Action, tuple[str, Any]] = {}
        actions = [action for action in parser._actions if _is_settable(action)]
        by_name = {_normalized(action.dest): action for action in actions}
        by_name |= {name: action for action in actions for name in _spellings(action)}
        for name, value in self._in_file.items():
            if name not in by_name:
                near = difflib.get_close_matches(name, by_name, 1)
                hint = f": did you mean {near[0]}?" if near else ""
                raise ConfigError(f"{self._file}: there is no setting {name!r}{hint}")
            in_file[by_name[name]] = (f"{self._file}: {name}", value)
        flags: list[str] = []
        for action in actions:
            if not given.isdisjoint(action.option_strings):
                continue
            name = action.dest.removeprefix(_OWN)
            variable = f"{_PREFIX}{name.upper()}"
            if found := _in_environment(name):
                value = _parts(found, variable) if _takes_several(action) else found
                flags += _flags(action, value, variable)
            elif action in in_file:
                where, value = in_file[action]
                flags += _flags(action, value, where)
        return [*flags, *self._rest]


def _in_environment(name: str) -> str | None:
    """Return the value of a variable; None if it is empty, or the address of a Service."""
    value = os.environ.get(f"{_PREFIX}{name.upper()}")
    is_link = name.endswith("port") and value is not None and _LINK.match(value)
    return None if is_link else value or None


def _is_settable(action: argparse.Action) -> bool:
    is_help = action.default is argparse.SUPPRESS or action.dest in ("help", "config")
    return bool(action.option_strings) and not is_help


def _spellings(action: argparse.Action) -> list[str]:
    return [_normalized(each[2:]) for each in action.option_strings if each.startswith("--")]


def _normalized(name: str) -> str:
    return name.replace("-", "_").removeprefix(_OWN)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(unreadable(path, error)) from error
    except yaml.MarkedYAMLError as error:
        # The text of the error quotes the line, which may have a key.
        mark = error.problem_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ConfigError(f"{path}{line}: not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: not YAML: {type(error).__name__}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ConfigError(f"{path}: write a mapping of names to values, such as 'port: 30000'")
    return {_normalized(name): value for name, value in content.items()}


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
    words = [word for each in values if (word := _word(action, each)) is not None]
    if len(words) < len(values) or (len(words) != 1 and not _takes_several(action)):
        shown = "such a value" if "key" in action.dest else repr(value)
        raise ConfigError(f"{where} cannot be {shown}: a text with such a look needs quotes")
    if action.nargs in ("+", "*"):
        return [flag, *words] if words else []
    return [f"{flag}={word}" for word in words]


def _word(action: argparse.Action, value: Any) -> str | None:
    """Return a value as a word of a command line; None if the flag cannot have the value.

    YAML reads ``12:30`` and ``0123`` as numbers and ``off`` as a switch, so a flag with a text for
    its value takes nothing but a text, or a switch that is among its choices.
    """
    is_text = action.type in (None, str)
    match value:
        case bool():
            names = ("on", "true") if value else ("off", "false")
            words = [name for name in names if name in (action.choices or ())]
            is_free = not is_text and action.type not in (int, float)
            return next(iter(words), str(value).lower() if is_free else None)
        case str():
            return value
        case int() | float():
            return None if is_text and not action.choices else str(value)
        case dict() if is_text or action.type is json.loads:
            with suppress(TypeError):
                return json.dumps(value)
    return None
