"""Uploads in parts, as OpenAI's client makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import md5
from pathlib import Path

import openai
import pytest

from batch.live_app import LiveApp
from batch.route_calls import refused
from batch.scenarios import OWNER, lines, opened, stream
from batch.scripted_backend import ENDPOINT, ScriptedBackend
from sglang_coserve.batch.errors import NotFoundError
from sglang_coserve.batch.uploads.uploads import CompleteUpload, CreateUpload, UploadObject, Uploads
from sglang_coserve.web.keys import owner_of
from waiting import eventually

CONTENT = lines(40)


@pytest.fixture
def app(tmp_path: Path) -> Iterator[LiveApp]:
    limits = {"max_upload_bytes": 1 << 16, "max_files_per_owner": 6}
    with LiveApp(tmp_path / "data", ScriptedBackend(), **limits) as app:
        yield app


def begin(client: openai.OpenAI, size_bytes: int = len(CONTENT)) -> str:
    upload = client.uploads.create(
        bytes=size_bytes, filename="in.jsonl", mime_type="application/jsonl", purpose="batch"
    )
    assert (upload.status, upload.bytes, upload.filename) == ("pending", size_bytes, "in.jsonl")
    assert upload.expires_at == upload.created_at + 3600
    return upload.id


def add(client: openai.OpenAI, upload_id: str, content: bytes) -> str:
    part = client.uploads.parts.create(upload_id, data=content)
    assert (part.object, part.upload_id) == ("upload.part", upload_id)
    return part.id


def test_what_comes_in_chunks_is_a_file_of_which_a_batch_is_made(client: openai.OpenAI) -> None:
    upload = client.uploads.upload_file_chunked(
        file=CONTENT,
        filename="in.jsonl",
        bytes=len(CONTENT),
        mime_type="application/jsonl",
        purpose="batch",
        part_size=len(CONTENT) // 3,
        md5=md5(CONTENT).hexdigest(),
    )
    assert upload.status == "completed" and upload.file is not None
    assert client.files.content(upload.file.id).read() == CONTENT
    assert [file.id for file in client.files.list()] == [upload.file.id]
    endpoint: object = ENDPOINT
    batch = client.batches.create(
        input_file_id=upload.file.id,
        endpoint=endpoint,  # type: ignore[arg-type]
        completion_window="24h",
    )
    eventually(lambda: client.batches.retrieve(batch.id).status == "completed")


def test_unknown_fields_are_ignored_with_a_warning(
    client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    upload_id = client.uploads.create(
        bytes=len(CONTENT),
        filename="in.jsonl",
        mime_type="application/jsonl",
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600, "tier": "cold"},  # type: ignore[typeddict-unknown-key]
        extra_body={"surprise": 1},
    ).id
    part_id = add(client, upload_id, CONTENT)
    client.uploads.complete(upload_id, part_ids=[part_id], extra_body={"sha256": "0"})
    said = [each.getMessage() for each in caplog.records if "ignored" in each.getMessage()]
    assert [text.split("are ignored: ")[1] for text in said] == [
        "expires_after.tier, surprise'",
        "sha256'",
    ]
    assert all(text.startswith(f"upload {upload_id}: ") for text in said)


def test_parts_are_put_together_in_the_order_that_is_named(client: openai.OpenAI) -> None:
    upload_id = begin(client)
    last, first = add(client, upload_id, CONTENT[100:]), add(client, upload_id, CONTENT[:100])
    add(client, upload_id, b"sent twice")
    assert not list(client.files.list())
    done = client.uploads.complete(upload_id, part_ids=[first, last])
    assert client.files.content(done.file.id).read() == CONTENT
    for call in (client.files.retrieve, client.files.content):
        with pytest.raises(openai.NotFoundError):
            call(first)


def test_a_file_may_have_thousands_of_parts(client: openai.OpenAI) -> None:
    upload_id = begin(client, 2 * 1500)
    part = add(client, upload_id, b"ab")
    done = client.uploads.complete(upload_id, part_ids=[part] * 1500)
    assert client.files.content(done.file.id).read() == b"ab" * 1500


def test_what_is_not_as_announced_can_be_mended(client: openai.OpenAI) -> None:
    upload_id = begin(client)
    part = add(client, upload_id, CONTENT)
    with pytest.raises(openai.BadRequestError) as caught:
        client.uploads.complete(upload_id, part_ids=[part, part])
    refused(caught, 400, "size_mismatch", "part_ids")
    with pytest.raises(openai.BadRequestError) as caught:
        client.uploads.complete(upload_id, part_ids=[part], md5="0" * 32)
    refused(caught, 400, "md5_mismatch", "md5")
    assert not list(client.files.list())
    assert client.uploads.complete(upload_id, part_ids=[part]).status == "completed"


def test_it_is_over_once_it_is_complete_or_cancelled(client: openai.OpenAI) -> None:
    upload_id = begin(client, 3)
    add(client, upload_id, b"abc")
    assert client.uploads.cancel(upload_id).status == "cancelled"
    with pytest.raises(openai.NotFoundError) as caught:
        add(client, upload_id, b"abc")
    refused(caught, 404, "upload_not_found", "upload_id")
    # Nothing of it counts any more: there is room for six files.
    for _ in range(6):
        client.files.create(file=("in.jsonl", CONTENT), purpose="batch")


def test_parts_are_their_owners_and_their_uploads(app: LiveApp, client: openai.OpenAI) -> None:
    upload_id, other_id = begin(client, 3), begin(client, 3)
    part = add(client, upload_id, b"abc")
    with pytest.raises(openai.NotFoundError) as caught:
        client.uploads.complete(other_id, part_ids=[part])
    refused(caught, 404, "part_not_found", "part_id")
    with app.client("another key") as other, pytest.raises(openai.NotFoundError):
        add(other, upload_id, b"abc")


async def test_one_that_is_completed_twice_at_a_time_is_one_file(tmp_path: Path) -> None:
    """As by a client whose first call took it too long."""
    async with (await opened(tmp_path)).service as service:
        wanted = CreateUpload(filename="f", purpose="batch", bytes=9)
        uploads = Uploads(service.context, service.files)
        upload_id = (await uploads.create(OWNER, wanted)).id
        part = await uploads.add_part(OWNER, upload_id, stream(bytes(9)))
        parts = CompleteUpload(part_ids=[part.id])
        ends = await asyncio.gather(
            *(uploads.complete(OWNER, upload_id, parts) for _ in range(3)),
            return_exceptions=True,
        )
        done = [each for each in ends if isinstance(each, UploadObject)]
        refused = [each for each in ends if isinstance(each, NotFoundError)]
        assert (len(done), len(refused)) == (1, 2)
        assert [file.id for file in (await service.list_files(OWNER)).data] == [done[0].file.id]


def test_its_completion_is_a_transfer_and_one_at_a_time(
    app: LiveApp, client: openai.OpenAI, key: str
) -> None:
    upload_id = begin(client)
    part = add(client, upload_id, CONTENT)
    assert app.service is not None
    with app.service.uploads.one(owner_of(key), of=upload_id):
        with pytest.raises(openai.ConflictError) as caught:
            client.uploads.complete(upload_id, part_ids=[part])
        refused(caught, 409, "in_progress", None)
    with ExitStack() as places:
        for _ in range(128):
            places.enter_context(app.service.uploads.one(owner_of(key)))
        with pytest.raises(openai.RateLimitError) as limited:
            client.uploads.complete(upload_id, part_ids=[part])
        assert limited.value.code == "too_many_uploads"
    assert client.uploads.complete(upload_id, part_ids=[part]).status == "completed"


def test_an_upload_goes_on_after_a_restart(tmp_path: Path) -> None:
    with LiveApp(tmp_path / "kept", ScriptedBackend()) as app, app.client() as client:
        upload_id = begin(client)
        first = add(client, upload_id, CONTENT[:100])
    with LiveApp(tmp_path / "kept", ScriptedBackend()) as app, app.client() as client:
        last = add(client, upload_id, CONTENT[100:])
        done = client.uploads.complete(upload_id, part_ids=[first, last])
        assert client.files.content(done.file.id).read() == CONTENT


def test_limits_are_those_of_files(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        begin(client, (1 << 16) + 1)
    refused(caught, 413, "file_too_large", "bytes")
    upload_id = begin(client, 10)
    with pytest.raises(openai.APIStatusError) as caught:
        add(client, upload_id, bytes((1 << 16) + 1))
    refused(caught, 413, "file_too_large", "file")
    for _ in range(5):
        add(client, upload_id, b"a")
    with pytest.raises(openai.RateLimitError):
        add(client, upload_id, b"a")
