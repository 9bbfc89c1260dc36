"""Names that users and neighbours meet: columns, JSON fields, headers, flags of commands.

Metrics, flags of the server and the gateway, and routes are not stored here: docs/prometheus.md,
docs/flags.md and docs/routes.md list them, and ``test/srt/test_documented_names.py`` holds these
pages to the code.
"""

from __future__ import annotations

import ast
import json
import re
import sqlite3
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Final

import sglang_coserve

HEADER: Final = re.compile(r"x-[a-z0-9-]+[a-z0-9]|retry-after|range|idempotency-key", re.IGNORECASE)

LIBRARY: Final = Path(sglang_coserve.__file__).parent


def tables() -> dict[str, list[str]]:
    """Return the columns of the batch store's tables, each with its type and constraints."""
    from sglang_coserve.batch.store.database import LAYOUT, SCHEMA

    with sqlite3.connect(":memory:") as database:
        for statement in SCHEMA:
            database.execute(statement)
        names = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1")
        found = {name: list(_columns(database, name)) for (name,) in names.fetchall()}
    return {"user_version": [str(LAYOUT)], **found}


def _columns(database: sqlite3.Connection, table: str) -> Iterator[str]:
    # Hidden columns too: generated ones.
    for _, name, kind, not_null, default, key, _ in database.execute(
        f"PRAGMA table_xinfo({table})"
    ):
        words = [name, kind, "not null" * not_null, "key" * bool(key)]
        yield " ".join(filter(None, [*words, f"default {default}" if default else ""]))


def stored_fields() -> dict[str, list[str]]:
    """Return the fields of the batch store's records; those without a default end with a star."""
    import msgspec

    from sglang_coserve.batch.record import BatchEvent, FileRecord, JobRecord

    _, schemas = msgspec.json.schema_components([BatchEvent, FileRecord, JobRecord])
    return {
        name: sorted(field + "*" * (field in schema["required"]) for field in schema["properties"])
        for name, schema in sorted(schemas.items())
        if "properties" in schema
    }


def json_fields() -> dict[str, list[str]]:
    """Return the fields of the Batch API's objects; required fields end with a star."""
    return {
        name: sorted(
            field + "*" * (field in schema.get("required", ())) for field in schema["properties"]
        )
        for name, schema in sorted(_document()["components"]["schemas"].items())
        if "properties" in schema
    }


def parameters() -> dict[str, list[str]]:
    """Return the parameters of each route of the Batch API that are not part of its path."""
    found = {}
    for path, operations in _document()["paths"].items():
        for method, operation in operations.items():
            names = [f"{each['in']} {each['name']}" for each in operation.get("parameters", ())]
            if given := sorted(name for name in names if not name.startswith("path ")):
                found[f"{method.upper()} {path}"] = given
    return dict(sorted(found.items()))


def _document() -> dict[str, Any]:
    from fastapi import FastAPI

    from sglang_coserve.batch.api import add_batch_routes

    app = FastAPI()
    add_batch_routes(app)
    return app.openapi()


def records() -> dict[str, Any]:
    """Return the records of a line that was answered and of one that failed."""
    from sglang_coserve.lines.backend import LineResult
    from sglang_coserve.lines.result_record import encode_record

    answered = LineResult(200, "request", {"answer": 1})
    failed = LineResult(0, "request", {"error": {"code": "code", "message": "message"}})
    return {
        name: json.loads(encode_record(7, 3, "custom", result))
        for name, result in (("answered", answered), ("failed", failed))
    }


def headers() -> list[str]:
    """Return the names of headers that the library reads or sets, by the literals in its source."""
    names = set()
    for file in LIBRARY.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
                text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
                if HEADER.fullmatch(text):
                    names.add(text.lower())
    return sorted(names)


def commands() -> dict[str, list[str]]:
    """Return the arguments and flags of each command of ``coserve``."""
    from typer.main import get_command

    from sglang_coserve.cli import app

    def walk(name: str, command: Any) -> Iterator[tuple[str, list[str]]]:
        named = [(*each.opts, *each.secondary_opts) for each in command.params]
        yield name, sorted(chain.from_iterable(named))
        for below, further in getattr(command, "commands", {}).items():
            yield from walk(f"{name} {below}", further)

    return dict(sorted(walk("coserve", get_command(app))))
