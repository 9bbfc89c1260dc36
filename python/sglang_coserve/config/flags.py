"""Frozen dataclasses as settings, whose fields are command-line flags."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Self

from sglang_coserve.core.ranges import check_ranges
from sglang_coserve.errors import ConfigError


class FlagParser(argparse.ArgumentParser):
    """A parser whose errors are ours, and that takes no beginning of a flag for the flag."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """See ``refuse``."""
        refuse(self, message)


def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Raise what argparse found as an error of one line, with what was probably meant.

    Raises:
        ConfigError: always.
    """
    if found := re.fullmatch(r"argument (\S+): invalid (?:int|float) value: (.*)", message):
        raise ConfigError(f"{found[1]}: {found[2]} is not a number; write it without a unit")
    known = [name for action in parser._actions for name in action.option_strings]
    if message.startswith("unrecognized arguments: "):
        for word in message.split():
            if word.startswith("--") and (near := difflib.get_close_matches(word, known, 1)):
                message += f" (did you mean {near[0]}?)"
                break
        else:
            message += " (--help shows all flags)"
    raise ConfigError(message)


def setting(
    default: Any, doc: str, *, is_off_at_zero: bool = False, is_secret: bool = False, **cli: Any
) -> Any:
    """Return a field that is a flag, with ``doc`` as its documentation and help.

    ``cli`` are arguments of argparse. With ``is_off_at_zero`` the value 0 asks for nothing, so that
    it may always be given. With ``is_secret`` the value is never shown.
    """
    metadata = {"doc": doc, "cli": cli, "is_off_at_zero": is_off_at_zero, "is_secret": is_secret}
    return dataclasses.field(default=default, metadata=metadata)


def flag(field_name: str) -> str:
    """Return the flag of a field."""
    return "--" + field_name.replace("_", "-")


def add_flags(group: Any, fields: Iterable[dataclasses.Field[Any]]) -> None:
    """Add a flag for each of ``fields``, made by ``setting``, to a parser or a group of one."""
    for field in fields:
        group.add_argument(
            flag(field.name),
            # argparse extends a copy of the default, which it can make of a list only.
            default=list(field.default) if field.default == () else field.default,
            help=_help(field),
            **field.metadata["cli"],
        )


def _help(field: dataclasses.Field[Any]) -> str:
    """Return a flag's help, with its default where it has one that the text does not name."""
    doc = str(field.metadata["doc"]).replace("%", "%%")
    if field.default in (None, False, ()) or "default" in doc:
        return doc
    return f"{doc} (default: %(default)s)"


@dataclass(frozen=True, slots=True)
class FlagSettings:
    """Settings of which every field, made by ``setting``, is a flag of the same name.

    Raises:
        ConfigError: on construction, when a value is out of its range.
    """

    def __post_init__(self) -> None:
        check_ranges(self, flag)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            choices = field.metadata["cli"].get("choices")
            if choices is not None and value != field.default and value not in choices:
                raise ConfigError(
                    f"{flag(field.name)} must be one of {', '.join(choices)}, got {value!r}"
                )

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add one flag per field to ``parser``, in a group named coserve."""
        group = parser.add_argument_group(
            "coserve", "Serving online and offline requests on one engine."
        )
        own = cls.__annotations__  # They come first.
        add_flags(group, sorted(dataclasses.fields(cls), key=lambda field: field.name not in own))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from the entries of ``values`` that name a field; others are ignored."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values, with stars for a secret that is set."""
        values = dataclasses.asdict(self)
        for field in dataclasses.fields(self):
            if field.metadata["is_secret"] and values[field.name] is not None:
                values[field.name] = "***"
        return values

    def changed(self) -> set[str]:
        """Return the names of the settings that ask for something else than the defaults do."""
        return {
            field.name
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
            and not (value == 0 and field.metadata["is_off_at_zero"])
        }
