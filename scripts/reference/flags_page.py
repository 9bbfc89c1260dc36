"""Writes docs/flags.md, the page of all flags of the server and the gateway, from their settings.

python scripts/reference/flags_page.py
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from sglang_coserve.config import (
    FIELDS_WITHOUT_EFFECT,
    OFFLINE_POLICIES,
    BatchApiConfig,
    CoserveConfig,
)
from sglang_coserve.config.flags import flag
from sglang_coserve.fleet.options import _parser

PAGE: Final = Path(__file__).parents[2] / "docs" / "flags.md"

_TOP: Final = """\
# All flags

For operators: the flags of `coserve serve` beside SGLang's, and those of `coserve gateway`. Other
commands list theirs with `--help`. [A script](../scripts/reference/flags_page.py) makes this page.
"""


def page() -> str:
    """Return the text of the page."""
    shared = {field.name for field in dataclasses.fields(BatchApiConfig)}
    own = [field for field in dataclasses.fields(CoserveConfig) if field.name not in shared]
    sections = (
        ("Serving", map(_of_field, own)),
        (
            "Batch API, of the server and the gateway",
            map(_of_field, dataclasses.fields(BatchApiConfig)),
        ),
        ("Gateway", _of_gateway({flag(name) for name in shared})),
    )
    parts = [_TOP]
    for title, rows in sections:
        parts.append(f"## {title}\n\n| flag | default | |\n|---|---|---|\n" + "".join(rows))
    return "\n".join(parts)


def _of_field(field: dataclasses.Field[Any]) -> str:
    text = field.metadata["doc"]
    refusing = [name for name in OFFLINE_POLICIES if field.name in FIELDS_WITHOUT_EFFECT[name]]
    acting = [name for name in OFFLINE_POLICIES if name not in refusing]
    if refusing:
        shorter, word = min((refusing, "Not"), (acting, "Only"), key=lambda pair: len(pair[0]))
        text += f" {word} with {', '.join(f'`{name}`' for name in shorter)}."
    return _row(flag(field.name), field.metadata["cli"].get("metavar"), field.default, text)


def _of_gateway(shared: set[str]) -> Iterator[str]:
    for action in _parser()._actions:
        (name,) = action.option_strings[-1:]
        if name not in shared and action.dest != "help":
            text = re.sub(r" \(default: %\(default\)s\)", "", action.help or "")
            yield _row(name, action.metavar, action.default, text)


def _row(name: str, metavar: Any, default: Any, text: str) -> str:
    shown = f"{name} {metavar}" if metavar else name
    if isinstance(default, tuple | list):
        default = " ".join(default)
    value = "" if default in (None, False, "") else f"`{default}`"
    return f"| `{shown}` | {value} | {_linked(text)} |\n"


def _linked(text: str) -> str:
    """Return a help text as Markdown: flags and headers as code, pages as links."""
    text = re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", text)
    code = r"(?<![\w`/-])(--[a-z][a-z-]*[a-z]|x-[a-z-]+[a-z]|/(?:v1|coserve)[\w/]*)"
    text = re.sub(code, r"`\1`", text)
    return text.replace("|", r"\|").replace("*", r"\*")


if __name__ == "__main__":
    PAGE.write_text(page())
