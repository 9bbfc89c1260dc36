"""Requests that are in no local file of lines, and results as a table: ``fsspec``, ``pyarrow``."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Final

from sglang_coserve.client.output_files import BatchResult, read_results
from sglang_coserve.durable_files import replace
from sglang_coserve.errors import InputFileError, require
from sglang_coserve.jsonl.request_line import parse_json
from sglang_coserve.lines.result_record import encode_json

TABLE: Final = ".parquet"
_STDIN: Final = "-"
_ROWS: Final = 1024
"""Held in memory at a time."""


@contextmanager
def local_lines(source: str) -> Iterator[Path]:
    """Yield a file of lines that is there until the context ends; a local one is itself.

    Args:
        source: A path, what ``fsspec`` opens (``s3://…``), or - for standard input. A table in
            Parquet has a column ``request`` with whole lines, or ``body``, with ``custom_id`` and
            ``url``.

    Raises:
        InputFileError: it cannot be read.
        MissingExtraError: the extra ``remote`` is not installed.
    """
    is_table, is_remote = source.endswith(TABLE), "://" in source
    if not (is_table or is_remote or source == _STDIN):
        yield Path(source)
        return
    if is_table or is_remote:
        require("remote", source)
    with TemporaryDirectory(prefix="coserve-") as folder:
        path = Path(folder) / f"{PurePath(source).stem if source != _STDIN else 'stdin'}.jsonl"
        try:
            with path.open("wb") as lines, _opened(source) as file:
                if is_table:
                    _write_lines(file, lines)
                else:
                    shutil.copyfileobj(file, lines, 1 << 20)
        except Exception as error:  # Each file system has errors of its own.
            raise InputFileError(f"{source}: cannot be read: {error}") from error
        yield path


@contextmanager
def _opened(source: str) -> Iterator[BinaryIO]:
    if source == _STDIN:
        yield sys.stdin.buffer
        return
    import fsspec

    with fsspec.open(source, "rb") as file:
        yield file


def _write_lines(table: BinaryIO, lines: BinaryIO) -> None:
    from pyarrow.parquet import ParquetFile

    for rows in ParquetFile(table).iter_batches(_ROWS):
        for row in rows.to_pylist():
            lines.write(_line(row) + b"\n")


def _line(row: Mapping[str, Any]) -> bytes:
    if isinstance(line := row.get("request"), str):
        return line.encode().replace(b"\n", b" ")  # In JSON no text has one.
    if isinstance(line, bytes):
        return line.replace(b"\n", b" ")
    if not {"custom_id", "body"} <= row.keys():
        needed = "a request as text, or custom_id and body"
        raise ValueError(f"a row needs {needed}; the columns are {', '.join(row)}")
    body = row["body"]
    if isinstance(body, str):
        body = body.encode()
    return encode_json(
        {
            "custom_id": row["custom_id"],
            "method": "POST",
            "url": row.get("url") or "/v1/chat/completions",
            "body": parse_json(body) if isinstance(body, bytes) else body,
        }
    )


def write_table(output: Path, table: Path) -> None:
    """Write the results in ``output`` and its error file to ``table``, in Parquet.

    Its columns are ``custom_id``; ``status_code`` and ``response``, the answer as JSON, null
    without one; ``error``, null where the line was served.

    The packages of the extra ``remote`` must be there.

    Raises:
        InputFileError: a file cannot be read or written.
    """
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    schema = pa.schema([("custom_id", pa.string()), ("status_code", pa.int32())])
    for name in ("response", "error"):
        schema = schema.append(pa.field(name, pa.string()))

    def write(file: BinaryIO) -> None:
        with ParquetWriter(file, schema) as writer:
            rows = map(_row, read_results(output))
            while some := list(islice(rows, _ROWS)):
                writer.write_table(pa.Table.from_pylist(some, schema))

    try:
        replace(table, write, 0o666)
    except OSError as error:
        raise InputFileError(f"cannot write {table}: {error.strerror or error}") from error


def _row(result: BatchResult) -> dict[str, Any]:
    answer, error = result.response, result.error
    return {
        "custom_id": result.custom_id,
        "status_code": answer.status_code if answer else None,
        "response": json.dumps(answer.body) if answer else None,
        "error": error and f"{error.code}: {error.message}".encode(errors="replace").decode(),
    }
