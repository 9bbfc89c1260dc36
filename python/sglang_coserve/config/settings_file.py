"""Settings of servers from one file and from the environment; what the command line says wins.

One TOML file may be for engines and gateways: tables [serve] and [gateway] are read by one command,
what is above them by both. Names are those of flags. An environment variable is such a name, too:
COSERVE_PORT, COSERVE_DATA_DIR; it wins over the file.
"""

from __future__ import annotations

import argparse
import difflib
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, ValidationError, create_model
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from sglang_coserve.errors import ConfigError

__all__ = ["with_settings"]

_PREFIX: Final = "COSERVE_"
_OWN: Final = "coserve_"
"""Left out of names: --coserve-data-dir is data_dir, and COSERVE_DATA_DIR."""

_FLAG: Final = "--settings"
_TABLES: Final = ("serve", "gateway")


def with_settings(argv: Sequence[str], parser: argparse.ArgumentParser, table: str) -> list[str]:
    """Return a command line with the flags that file and environment add in front of ``argv``.

    The file is that of ``--settings``, or of the variable COSERVE_SETTINGS. A flag that may be
    given several times is not added to one of ``argv``.

    Args:
        argv: The command line, without the program's name.
        parser: Knows all flags of the command.
        table: That of the command in the file.

    Raises:
        ConfigError: the file cannot be read, or a name or value in it is unknown or wrong.
    """
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument(_FLAG, default=os.environ.get(f"{_PREFIX}SETTINGS"))
    chosen, rest = own.parse_known_args(list(argv))
    given = {word.partition("=")[0] for word in rest}
    actions = dict(_settable(parser._actions))
    in_file = _read(Path(chosen.settings), table) if chosen.settings else {}
    for name in in_file:
        if name not in actions:
            near = difflib.get_close_matches(name, actions, 1)
            hint = f": did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{chosen.settings}: there is no setting {name!r}{hint}")
    found = _validated(actions, in_file, chosen.settings)
    flags: list[str] = []
    for name, value in found.items():
        action = actions[name]
        if value is not None and not given.intersection(action.option_strings):
            flags += _flags(action, value)
    return [*flags, *rest]


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
        raise ConfigError(f"{path} cannot be read: {error}") from error
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


def _validated(
    actions: Mapping[str, argparse.Action], in_file: Mapping[str, Any], path: str | None
) -> Mapping[str, Any]:
    fields: dict[str, Any] = {name: (_kind(action), None) for name, action in actions.items()}
    settings = create_model("Settings", __base__=_Settings, **fields)
    try:
        found = settings(**in_file)
    except (ValidationError, SettingsError) as error:
        where = f"{path}, or variables {_PREFIX}…" if path else f"variables {_PREFIX}…"
        raise ConfigError(f"{where}: {_explained(error)}") from error
    return {name: getattr(found, name) for name in actions}


class _Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, env_ignore_empty=True, protected_namespaces=()
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment wins over the file, which is passed in."""
        return env_settings, init_settings


def _explained(error: ValidationError | SettingsError) -> str:
    if isinstance(error, SettingsError):
        return str(error)
    fault = error.errors()[0]
    return f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}, not {fault['input']!r}"


def _words(value: Any) -> Any:
    """Split what a variable holds; in a file, a list is a list."""
    if isinstance(value, str):
        return value.split()
    return [value] if isinstance(value, int | float) else value


def _text(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


_One = Annotated[str | None, BeforeValidator(_text)]
_Many = Annotated[list[_One] | None, NoDecode, BeforeValidator(_words)]


def _takes_many(action: argparse.Action) -> bool:
    return action.nargs in ("+", "*") or isinstance(action, argparse._AppendAction)


def _kind(action: argparse.Action) -> Any:
    if action.nargs == 0:
        return bool | None
    return _Many if _takes_many(action) else _One


def _flags(action: argparse.Action, value: Any) -> list[str]:
    flag = max(action.option_strings, key=len)
    if isinstance(action, argparse.BooleanOptionalAction):
        return [next(each for each in action.option_strings if each.startswith("--no-") != value)]
    if action.nargs == 0:
        return [flag] if value else []
    if action.nargs in ("+", "*"):
        return [flag, *value]
    if isinstance(value, list):
        return [f"{flag}={each}" for each in value]
    return [f"{flag}={value}"]
