"""What the routes answer to calls that are wrong, by accident or on purpose."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import openai
import pytest

from batch.live_app import LiveApp
from batch.route_calls import upload
from batch.scenarios import lines
from batch.scripted_backend import ENDPOINT, ScriptedBackend
from sglang_coserve.batch.routes.transfers import UploadForm
from sglang_coserve.web.errors import ApiError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def app(data: Path) -> Iterator[LiveApp]:
    with LiveApp(data, ScriptedBackend(holds=True)) as app:
        yield app


@pytest.fixture
def key() -> str:
    """An owner that has nothing."""
    return uuid4().hex


def stored(data: Path) -> set[str]:
    return {path.name for path in (data / "files").iterdir()}


@pytest.mark.parametrize(
    ("wanted", "status", "got"),
    [
        ("bytes=0-3", 206, b"0123"),
        ("bytes=7-", 206, b"789"),
        ("bytes=7-100", 206, b"789"),
        ("bytes=-2", 206, b"89"),
        ("bytes=-100", 206, b"0123456789"),
        ("bytes=5-2", 200, b"0123456789"),
        ("bytes=0-1,3-4", 200, b"0123456789"),
        ("lines=1-2", 200, b"0123456789"),
    ],
)
def test_parts_of_a_file(
    client: openai.OpenAI, http: httpx2.Client, wanted: str, status: int, got: bytes
) -> None:
    file_id = upload(client, b"0123456789")
    answer = http.get(f"/v1/files/{file_id}/content", headers={"range": wanted})
    assert (answer.status_code, answer.content) == (status, got)
    if status == 206:
        start = b"0123456789".index(got)
        assert answer.headers["content-range"] == f"bytes {start}-{start + len(got) - 1}/10"


@pytest.mark.parametrize("wanted", ["bytes=10-", "bytes=99-120", "bytes=-0"])
def test_a_part_that_is_not_there(client: openai.OpenAI, http: httpx2.Client, wanted: str) -> None:
    file_id = upload(client, b"0123456789")
    answer = http.get(f"/v1/files/{file_id}/content", headers={"range": wanted})
    assert (answer.status_code, answer.json()["error"]["code"]) == (416, "invalid_range")
    assert answer.headers["content-range"] == "bytes */10"


def test_a_name_is_never_a_path(client: openai.OpenAI, http: httpx2.Client, data: Path) -> None:
    for name in ("../../etc/passwd", "a/b", "/etc/passwd", "a\0b", "..", "%2e%2e%2fx", "CON"):
        file = client.files.create(file=(name, lines(1)), purpose="batch")
        answer = http.get(f"/v1/files/{file.id}/content")
        assert answer.content == lines(1)
        sent = answer.headers["content-disposition"].partition("''")[2]
        assert not set(sent) & set("/\\")
    assert {file.id for file in client.files.list()} <= stored(data)


FORMS = {
    "no file": ([("purpose", (None, "batch"))], "missing_file"),
    "no name": ([("purpose", (None, "batch")), ("file", (None, "x"))], "missing_filename"),
    "empty name": ([("purpose", (None, "batch")), ("file", ("", b"x"))], "missing_filename"),
    "long name": ([("purpose", (None, "batch")), ("file", ("x" * 300, b"x"))], "invalid_filename"),
    "no purpose": ([("file", ("a", b"x"))], "invalid_purpose"),
    "purpose": ([("purpose", (None, "fine-tune")), ("file", ("a", b"x"))], "invalid_purpose"),
    "late purpose": ([("file", ("a", b"x")), ("purpose", (None, "vision"))], "invalid_purpose"),
    "two files": (
        [("purpose", (None, "batch")), ("file", ("a", b"x")), ("file", ("b", b"y"))],
        "too_many_files",
    ),
    "many fields": ([(f"f{n}", (None, "x")) for n in range(50)], "invalid_form"),
    "expiry": (
        [
            ("purpose", (None, "batch")),
            ("expires_after[seconds]", (None, "-5")),
            ("expires_after[anchor]", (None, "created_at")),
            ("file", ("a", b"x")),
        ],
        "invalid_value",
    ),
    "half an expiry": (
        [
            ("file", ("a", b"x")),
            ("purpose", (None, "batch")),
            ("expires_after[seconds]", (None, "3600")),
        ],
        "invalid_value",
    ),
}


@pytest.mark.parametrize(("parts", "code"), FORMS.values(), ids=FORMS)
def test_forms_that_cannot_be_used(
    client: openai.OpenAI, http: httpx2.Client, data: Path, parts: Any, code: str
) -> None:
    before = stored(data)
    answer = http.post("/v1/files", files=parts)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert client.files.list().data == []
    assert stored(data) == before


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b"--x--"),
        ("multipart/form-data; boundary=x", b""),
        ("multipart/form-data; boundary=x", b"no boundary"),
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="fi'),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\ncut off',
        ),
        ("multipart/form-data; boundary=" + "x" * 500, b""),
    ],
)
def test_bodies_that_are_no_form(
    http: httpx2.Client, data: Path, content_type: str, body: bytes
) -> None:
    before = stored(data)
    answer = http.post("/v1/files", content=body, headers={"content-type": content_type})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")
    assert stored(data) == before


_FILE = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n'
_PURPOSE = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
_ENDLESS = {
    "one field": (b"", _PURPOSE),
    "nameless parts": (b"", b"--x\r\nContent-Type: text/plain\r\n\r\nx\r\n"),
    "parts without headers": (b"", b"--x\r\n\r\nx\r\n"),
    "a field": (b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n', b"x" * 1000),
    "a header's name": (b"--x\r\n", b"x" * 1000),
    "a header's value": (b"--x\r\nContent-Disposition: ", b"x" * 1000),
    "headers": (b"--x\r\n", b"A: b\r\n" * 100),
    "line endings before": (b"", b"\r\n" * 500),
    "fields behind": (_PURPOSE + _FILE, _PURPOSE),
    "headers behind": (_PURPOSE + _FILE + b"--x\r\n", b"A: b\r\n" * 100),
}


@pytest.mark.parametrize(
    "boundary", ["x", "===1===", "----WebKit7MA4", '"a b:(c)"', "x; charset=a"]
)
@pytest.mark.parametrize("chunk_bytes", [1, 7, 1 << 16])
async def test_a_form_is_read_however_it_comes(boundary: str, chunk_bytes: int) -> None:
    content = b"\r\n--\r\n" + bytes(range(256)) + b"\r\n--"
    mark = b"--" + boundary.partition(";")[0].strip('"').encode()
    head = (
        b'\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
        b"\r\nContent-Type: a/b\r\ncontent-disposition:form-data;name=file;"
        b'filename="\xc3\xbc %22 .jsonl"\r\n\r\n',
    )
    sent = mark + head[0] + mark + head[1] + content + b"\r\n" + mark + b"--\r\n"

    async def body() -> AsyncIterator[bytes]:
        for start in range(0, len(sent), chunk_bytes):
            yield sent[start : start + chunk_bytes]

    form = UploadForm(f"Multipart/Form-Data; boundary={boundary}", body())
    await form.read_to_file()
    assert b"".join([chunk async for chunk in form.file_chunks()]) == content
    assert form.filename == 'ü " .jsonl'


@pytest.mark.parametrize("chunk_bytes", [7, 1 << 16])
@pytest.mark.parametrize(("head", "rest"), _ENDLESS.values(), ids=_ENDLESS)
async def test_a_form_without_end_is_read_to_a_limit(
    head: bytes, rest: bytes, chunk_bytes: int
) -> None:
    taken = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal taken
        pieces = itertools.chain([head], itertools.repeat(rest))
        content = b""
        while True:
            while len(content) < chunk_bytes:
                content += next(pieces)
            taken += chunk_bytes
            assert taken < 1_000_000, "still reading"
            yield content[:chunk_bytes]
            content = content[chunk_bytes:]

    form = UploadForm("multipart/form-data; boundary=x", body())
    with pytest.raises(ApiError) as caught:
        await form.read_to_file()
        async for _ in form.file_chunks():
            pass
    assert caught.value.code == "invalid_form"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_compressed_body_is_not_unpacked(http: httpx2.Client, data: Path, encoding: str) -> None:
    """A thousandth of what it would become, it could fill memory or disk."""
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    form = head + bytes(30_000_000) + b"\r\n--x--\r\n"
    packed = gzip.compress(form) if encoding == "gzip" else zlib.compress(form)
    before = stored(data)
    headers = {"content-type": "multipart/form-data; boundary=x", "content-encoding": encoding}
    answer = http.post("/v1/files", content=packed, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")
    assert stored(data) == before


def test_half_a_surrogate_pair_becomes_a_character(
    client: openai.OpenAI, http: httpx2.Client
) -> None:
    body = {"input_file_id": upload(client, lines(1)), "endpoint": ENDPOINT}
    body |= {"completion_window": "24h", "metadata": {"note": "cut \ud83d"}}
    headers = {"content-type": "application/json"}
    answer = http.post("/v1/batches", content=json.dumps(body), headers=headers)
    assert answer.raise_for_status().json()["metadata"] == {"note": "cut \ufffd"}


BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "no endpoint": ({"endpoint": None}, "endpoint"),
    "endpoint": ({"endpoint": "/v1/images"}, "endpoint"),
    "window": ({"completion_window": "soon"}, "completion_window"),
    "17 pairs": ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    "long key": ({"metadata": {"k" * 65: ""}}, "metadata"),
    "long value": ({"metadata": {"k": "v" * 513}}, "metadata"),
    "number as metadata": ({"metadata": {"k": 1}}, "metadata"),
    "expiry": ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "seconds"),
    "anchor": ({"output_expires_after": {"anchor": "finished_at", "seconds": 3600}}, "anchor"),
    "no file": ({"input_file_id": None}, "input_file_id"),
    "priority": ({"coserve": {"priority": 101}}, "priority"),
    "unknown option": ({"coserve": {"surprise": 1}}, "coserve.surprise"),
}


def test_unknown_fields_are_ignored_with_a_warning(
    client: openai.OpenAI, http: httpx2.Client
) -> None:
    body = {
        "input_file_id": upload(client, lines(1)),
        "endpoint": ENDPOINT,
        "completion_window": "24h",
    }
    key = {"idempotency-key": "key", "content-type": "application/json"}
    surprises = {f"surprise{n}": {"x" * 100: "\ud83d"} for n in range(7)} | {"y" * 100: 1}
    expiry = {"anchor": "created_at", "seconds": 3600, "surprise": 1}
    answers = [
        http.post("/v1/batches", content=json.dumps(body | extra), headers=key).json()
        for extra in ({}, surprises, {"model": "m"})
    ]
    assert len({answer["id"] for answer in answers}) == 1
    said = [answer["coserve"]["warning"] or "" for answer in answers]
    assert "ignored" not in said[0]
    assert "surprise0, surprise1, surprise2, surprise3, surprise4 and 3 more" in said[1]
    assert "does not know are ignored: model" in said[2]
    answer = http.post("/v1/batches", json=body | {"output_expires_after": expiry, "z": 1}).json()
    assert "ignored: output_expires_after.surprise, z" in answer["coserve"]["warning"]


def test_unknown_fields_of_a_form_are_ignored_with_a_warning(
    http: httpx2.Client, caplog: pytest.LogCaptureFixture
) -> None:
    parts = {
        "purpose": (None, "batch"),
        "file": ("in.jsonl", lines(1)),
        "expires_after[surprise]": (None, "1"),
        "late\nsurprise": (None, "2"),
    }
    answer = http.post("/v1/files", files=parts)
    assert answer.status_code == 200
    (said,) = (each.getMessage() for each in caplog.records if "ignored" in each.getMessage())
    assert said.startswith("file 'in.jsonl': ")
    assert said.endswith("ignored: expires_after[surprise], late\\nsurprise'")


@pytest.mark.parametrize(("changes", "param"), BODIES.values(), ids=BODIES)
def test_bodies_that_cannot_be_used(
    client: openai.OpenAI, http: httpx2.Client, changes: dict[str, Any], param: str
) -> None:
    body = {
        "input_file_id": upload(client, lines(1)),
        "endpoint": ENDPOINT,
        "completion_window": "24h",
    }
    answer = http.post("/v1/batches", json=body | changes)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert param.removeprefix("body.") in error["param"]
    assert client.batches.list().data == []


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"null", 400),
        (b"[]", 400),
        (b"{", 400),
        (b'{"a":' * 99, 400),
        (b"[" * 400, 400),
        (b"[" * 999, 413),
        (b'{"a":' * 50_000, 413),
        (b"[" * 50_000, 413),
        (b'"\xff"', 400),
    ],
)
def test_bodies_that_are_no_object(http: httpx2.Client, content: bytes, status: int) -> None:
    headers = {"content-type": "application/json"}
    answer = http.post("/v1/batches", content=content, headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("metadata", "padding"),
    [
        (None, b" " * 2_000_000),
        ({"key": [[]] * 200_000}, b""),
        ({str(number): "" for number in range(50_000)}, b""),
    ],
    ids=["bytes", "values", "keys"],
)
def test_a_body_that_is_too_large_is_not_even_parsed(
    client: openai.OpenAI, http: httpx2.Client, metadata: Any, padding: bytes
) -> None:
    wanted = {
        "input_file_id": upload(client, lines(1)),
        "endpoint": ENDPOINT,
        "completion_window": "24h",
        "metadata": metadata,
    }
    content = json.dumps(wanted).encode() + padding
    headers = {"content-type": "application/json"}
    answer = http.post("/v1/batches", content=content, headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert client.batches.list().data == []


# --- Whose is what -----------------------------------------------------------------------

ODD_IDS = [
    "file-000000000000000000000000",
    "batch_' OR 1=1 --",
    "..%2F..%2Fetc%2Fpasswd",
    "%00",
    "\u2603",
    "x" * 64,
]


@pytest.mark.parametrize("object_id", ODD_IDS)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/files/{}"),
        ("GET", "/v1/files/{}/content"),
        ("DELETE", "/v1/files/{}"),
        ("GET", "/v1/batches/{}"),
        ("POST", "/v1/batches/{}/cancel"),
        ("POST", "/v1/batches/{}/pause"),
        ("POST", "/v1/batches/{}/resume"),
    ],
)
def test_ids_that_are_nobodys(http: httpx2.Client, method: str, path: str, object_id: str) -> None:
    answer = http.request(method, path.format(object_id))
    assert answer.status_code == 404


SQL = "x' OR '1'='1'; DROP TABLE files; --"


def test_sql_is_text_wherever_it_stands(client: openai.OpenAI, http: httpx2.Client) -> None:
    with openai.OpenAI(base_url=client.base_url, api_key=SQL, max_retries=0) as another:
        assert another.files.list().data == []
    file = client.files.create(file=(SQL, lines(1)), purpose="batch")
    assert client.files.retrieve(file.id).filename == SQL
    for path in ("/v1/files", "/v1/batches"):
        assert http.get(path, params={"after": SQL}).status_code == 404
    assert http.get("/v1/files", params={"purpose": SQL}).json()["data"] == []
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint=ENDPOINT,
        completion_window="24h",
        metadata={SQL: SQL},
        extra_headers={"Idempotency-Key": SQL},
    )
    assert batch.metadata == {SQL: SQL}
    assert [each.id for each in client.batches.list()] == [batch.id]
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id=SQL, endpoint=ENDPOINT, completion_window="24h")
