"""OpenAI's own client against the routes, over a real connection."""

from __future__ import annotations

import os
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai.types import Batch

from batch.live_app import LiveApp
from batch.route_calls import (
    create,
    engine_has,
    eventually,
    finish,
    records,
    refused,
    until,
    upload,
)
from batch.scenarios import line, lines
from batch.scripted_backend import ENDPOINT, ScriptedBackend


@pytest.fixture
def app(tmp_path: Path) -> Iterator[LiveApp]:
    with LiveApp(tmp_path / "data", ScriptedBackend(holds=True)) as app:
        yield app


# --- Files -------------------------------------------------------------------------------


def test_no_client_learns_where_the_server_keeps_its_files(
    app: LiveApp, client: openai.OpenAI
) -> None:
    assert app.service is not None and app.data is not None
    store = app.service.context.store
    for each in (store, store.lists):
        app.in_loop(lambda each=each: setattr(each, "_attempt", broken))
    for call in (
        lambda: client.files.create(file=lines(1), purpose="batch"),
        lambda: client.batches.retrieve("batch_1"),
        lambda: client.files.list(),
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            call()
        assert "coserve.sqlite failed: no such table" in str(caught.value)
        assert str(app.data) not in str(caught.value)
    for each in (store, store.lists):
        app.in_loop(lambda each=each: delattr(each, "_attempt"))


def broken(_work: object) -> None:
    raise sqlite3.OperationalError("no such table")


def test_a_file_comes_back_as_it_was(client: openai.OpenAI) -> None:
    content = os.urandom(3_000_000) + b"\xff\x00\r\n--not-a-boundary--\r\n"
    file = client.files.create(file=("täst \u2603.jsonl", content), purpose="batch")
    assert (file.object, file.bytes, file.purpose) == ("file", len(content), "batch")
    assert (file.filename, file.status) == ("täst \u2603.jsonl", "processed")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == content
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError) as caught:
        client.files.retrieve(file.id)
    refused(caught, 404, "file_not_found", "file_id")


def test_an_expiry_is_taken_before_and_after_the_file(
    client: openai.OpenAI, http: httpx2.Client
) -> None:
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    early = client.files.create(file=("in.jsonl", lines(1)), purpose="batch", expires_after=expiry)
    assert early.expires_at == early.created_at + 3600
    parts = [
        ("file", ("in.jsonl", lines(1))),
        ("purpose", (None, "batch")),
        ("expires_after[seconds]", (None, "7200")),
        ("expires_after[anchor]", (None, "created_at")),
    ]
    late = http.post("/v1/files", files=parts).raise_for_status().json()
    assert late["expires_at"] - late["created_at"] == 7200


def test_pages_of_files(app: LiveApp, client: openai.OpenAI) -> None:
    with app.client("another") as other:
        ids = [(upload(client, lines(1)), upload(other, lines(1)))[0] for _ in range(5)]
    assert [file.id for file in client.files.list(limit=2)] == ids[::-1]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == ids
    page = client.files.list(limit=2, after=ids[1])
    assert ([file.id for file in page.data], page.has_more) == ([ids[0]], False)
    assert client.files.list(purpose="batch_output").data == []


def test_an_upload_over_the_limit_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with LiveApp(data, max_upload_bytes=1000) as app, app.client() as client:
        assert client.files.retrieve(upload(client, b"x" * 1000)).bytes == 1000
        for size_bytes in (1001, 20_000_000):
            with pytest.raises(openai.APIStatusError) as caught:
                upload(client, b"x" * size_bytes)
            refused(caught, 413, "file_too_large", "file")
        assert len(client.files.list().data) == 1
        assert len(list((data / "files").iterdir())) == 1


def test_an_upload_that_breaks_off_leaves_nothing(
    app: LiveApp, client: openai.OpenAI, tmp_path: Path
) -> None:
    head = (
        "POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key\r\n"
        "content-type: multipart/form-data; boundary=x\r\ncontent-length: 9000000\r\n\r\n"
        '--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    )
    files = tmp_path / "data" / "files"
    with socket.create_connection(("127.0.0.1", app.port)) as connection:
        connection.sendall(head.encode() + b"x" * 4_000_000)
        eventually(lambda: bool(list(files.iterdir())))
    eventually(lambda: not list(files.iterdir()))
    assert client.files.list().data == []


# --- Batches -----------------------------------------------------------------------------


def test_a_batch_to_its_end(app: LiveApp, client: openai.OpenAI) -> None:
    batch = create(client, lines(2) + line("bad", max_tokens=-1).encode(), metadata={"a": "b"})
    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", ENDPOINT)
    assert batch.metadata == {"a": "b"}
    assert batch.expires_at == batch.created_at + 86_400
    engine_has(app, 3)
    finish(app, "id-1")
    batch = until(client, batch.id, "in_progress", some_done=True)
    # Readable while it runs.
    assert records(client, batch.output_file_id).keys() == {"id-1"}
    finish(app, "id-2", "bad")
    batch = until(client, batch.id, "completed")
    assert batch.request_counts.completed == 3
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
    assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    output = client.files.retrieve(batch.output_file_id or "")
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    record = records(client, output.id)["id-2"]
    assert record["id"].startswith("batch_req_")
    assert record["response"]["request_id"] == "cmpl-id-2"
    assert {int(each.deadline_s) for each in app.backend.started} == {batch.expires_at}
    assert record["response"]["status_code"] == 200
    assert record["error"] is None
    assert client.batches.list().data == [batch]


def test_an_idempotency_key_of_an_owner_makes_one_batch(
    app: LiveApp, client: openai.OpenAI
) -> None:
    file_id = upload(client, lines(1))

    def again(window: Any = "24h") -> Batch:
        return client.batches.create(
            input_file_id=file_id,
            endpoint=ENDPOINT,
            completion_window=window,
            extra_headers={"Idempotency-Key": "once"},
        )

    first = again()
    assert again().id == first.id
    with pytest.raises(openai.ConflictError) as caught:
        again("1h")
    refused(caught, 409, "idempotency_conflict", "Idempotency-Key")
    assert len(client.batches.list().data) == 1
    with app.client("another") as other:
        theirs = create(other, lines(1), extra_headers={"Idempotency-Key": "once"})
    assert theirs.id != first.id


def test_another_key_sees_and_changes_nothing(app: LiveApp, client: openai.OpenAI) -> None:
    batch = create(client, lines(1))
    engine_has(app, 1)
    with app.client("another") as other:
        assert other.files.list().data == other.batches.list().data == []
        calls = [
            lambda: other.files.retrieve(batch.input_file_id),
            lambda: other.files.content(batch.input_file_id),
            lambda: other.files.delete(batch.input_file_id),
            lambda: other.files.list(after=batch.input_file_id),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.batches.list(after=batch.id),
            lambda: other.batches.create(
                input_file_id=batch.input_file_id, endpoint=ENDPOINT, completion_window="24h"
            ),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                call()
    assert client.batches.retrieve(batch.id).status == "in_progress"


def test_without_a_directory_every_call_says_how_to_switch_it_on() -> None:
    with LiveApp(None) as app, app.client() as client:
        calls = [
            lambda: client.batches.list(),
            lambda: upload(client, lines(1)),
            lambda: client.batches.create(
                input_file_id="x", endpoint=ENDPOINT, completion_window="24h"
            ),
        ]
        for call in calls:
            with pytest.raises(openai.APIStatusError, match="--coserve-data-dir") as caught:
                call()
            refused(caught, 404, "batch_api_off", None)


def test_an_endpoint_in_azures_form_is_openais(client: openai.OpenAI) -> None:
    endpoint: Any = "/completions"
    content = lines(1).replace(ENDPOINT.encode(), endpoint.encode())
    batch = client.batches.create(
        input_file_id=upload(client, content), endpoint=endpoint, completion_window="24h"
    )
    assert until(client, batch.id, "in_progress").endpoint == ENDPOINT
