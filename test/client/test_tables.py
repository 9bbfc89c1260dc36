"""Inputs that fsspec opens, tables and standard input become lines; results become a table."""

from __future__ import annotations

import io
import json
import sys
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec import AbstractFileSystem

from sglang_coserve.client.tables import local_lines, write_table
from sglang_coserve.errors import InputFileError
from sglang_coserve.lines.backend import LineResult
from sglang_coserve.lines.result_record import encode_record

LINE = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}'


class Locked(AbstractFileSystem):  # type: ignore[misc]
    """Its errors are of a kind of its own, as those of S3's library."""

    protocol = "locked"

    def _open(self, *_: object, **__: object) -> None:
        raise Exception("no credentials")


def read(source: str) -> list[Any]:
    with local_lines(source) as path:
        return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_local_file_is_itself(tmp_path: Path) -> None:
    with local_lines(str(tmp_path / "none.jsonl")) as path:
        assert path == tmp_path / "none.jsonl"


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_an_address_is_read_and_nothing_of_it_stays(tmp_path: Path, kind: str) -> None:
    url = f"{kind}://{tmp_path}/in.jsonl"
    with fsspec.open(url, "w") as file:
        file.write(f"{LINE}\n{LINE}\n")
    assert read(url) == [json.loads(LINE)] * 2
    with local_lines(url) as path:
        assert path.name == "in.jsonl"
    assert not path.exists()


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(LINE.encode())))
    assert read("-") == [json.loads(LINE)]


@pytest.mark.parametrize(
    "columns",
    [
        {"request": [LINE, LINE.replace(", ", ",\n")]},
        {"request": [LINE.encode()] * 2},
        {"custom_id": ["a", "a"], "url": ["/v1/completions"] * 2, "body": ['{"prompt":"x"}'] * 2},
        {"custom_id": ["a", "a"], "url": ["/v1/completions"] * 2, "body": [{"prompt": "x"}] * 2},
    ],
)
@pytest.mark.parametrize("kind", ["", "memory:/"])
def test_a_table(tmp_path: Path, columns: dict[str, list[Any]], kind: str) -> None:
    url = f"{kind}{tmp_path}/in.parquet"
    with fsspec.open(url, "wb") as file:
        pq.write_table(pa.table(columns), file)
    assert read(url) == [json.loads(LINE)] * 2


def test_a_table_without_urls_is_of_chats(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Who? \ud83d"}], "seed": 2**70}
    path = tmp_path / "in.parquet"
    pq.write_table(pa.Table.from_pylist([{"custom_id": "a", "body": json.dumps(body)}]), path)
    (line,) = read(str(path))
    body["messages"] = [{"role": "user", "content": "Who? \ufffd"}]  # As of any line.
    assert (line["url"], line["body"]) == ("/v1/chat/completions", body)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("memory://nowhere.jsonl", "nowhere"),
        ("nosuch://a.jsonl", "nosuch"),
        ("none.parquet", "none.parquet"),
        ("text.parquet", "Parquet"),
        ("other.parquet", "custom_id and body; the columns are prompt"),
        ("struct.parquet", "a request as text"),
        ("decimal.parquet", "Decimal"),
        ("locked://a.jsonl", "no credentials"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.parquet").write_text("text")
    pq.write_table(pa.table({"prompt": ["x"]}), "other.parquet")
    pq.write_table(pa.table({"request": [{"custom_id": "a"}]}), "struct.parquet")
    body = {"prompt": "x", "temperature": Decimal("0.7")}
    pq.write_table(pa.Table.from_pylist([{"custom_id": "a", "body": body}]), "decimal.parquet")
    fsspec.register_implementation("locked", Locked, clobber=True)
    with pytest.raises(InputFileError, match=rf"^{name}: cannot be read: .*{says}"):
        read(name)


def test_results_become_a_table(tmp_path: Path) -> None:
    output, table = tmp_path / "out.jsonl", tmp_path / "out.parquet"
    output.write_bytes(encode_record(1, 1, "a", LineResult(200, "r", {"choices": []})))
    (tmp_path / "out.errors.jsonl").write_bytes(
        encode_record(1, 2, "b", LineResult(400, "", {"message": "too long \ud83d"}))
        + encode_record(1, 3, None, LineResult.unserved("invalid_json_line", "not JSON"))
    )
    write_table(output, table)
    assert pq.read_table(table).to_pylist() == [
        {"custom_id": "a", "status_code": 200, "response": '{"choices": []}', "error": None},
        {
            "custom_id": "b",
            "status_code": 400,
            "response": '{"message": "too long \\ud83d"}',
            "error": "http_400: too long ?",
        },
        {
            "custom_id": None,
            "status_code": None,
            "response": None,
            "error": "invalid_json_line: not JSON",
        },
    ]
