"""Calls about batches: repeated, refused, broken off, and pages of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from batch.scenarios import OWNER, lines, list_files, opened, wanted
from batch.scripted_backend import ENDPOINT, ScriptedBackend
from sglang_coserve.batch.errors import (
    BatchRequestError,
    ConflictError,
    NotFoundError,
    TooManyError,
)
from sglang_coserve.batch.schemas import BatchObject


async def test_a_caller_who_hangs_up_leaves_no_batch_without_a_driver(tmp_path: Path) -> None:
    async with (scene := await opened(tmp_path)).service as service:
        file = await scene.upload(lines(1))
        calling = asyncio.create_task(service.create_batch(OWNER, wanted(file)))
        await asyncio.sleep(0)
        calling.cancel()
        await asyncio.wait({calling})
        assert calling.cancelled()

        async def known() -> BatchObject | None:
            return next(iter((await service.list_batches(OWNER)).data), None)

        assert (await scene.ends((await scene.eventually(known)).id)).status == "completed"


async def test_a_repeated_request_with_its_key_is_the_same_batch(tmp_path: Path) -> None:
    async with (scene := await opened(tmp_path)).service as service:
        file = await scene.upload(lines(1))
        first = await service.create_batch(OWNER, wanted(file), "key")
        again = await service.create_batch(OWNER, wanted(file), "key")
        other = await service.create_batch(OWNER, wanted(file), "another")
        assert first.id == again.id != other.id
        with pytest.raises(ConflictError) as caught:
            await service.create_batch(OWNER, wanted(file, "1h"), "key")
        assert caught.value.code == "idempotency_conflict"
        await scene.ends(first.id)
        after = await service.create_batch(OWNER, wanted(file), "key")
        assert (after.id, after.status) == (first.id, "completed")


async def test_batches_that_cannot_be_created(tmp_path: Path) -> None:
    scene = await opened(tmp_path, ScriptedBackend(holds=True), max_active_batches=1)
    async with scene.service as service:
        file = await scene.upload(lines(1))
        request = wanted(file)
        request.endpoint = "/v1/embeddings"
        with pytest.raises(BatchRequestError, match=f"/v1/chat/completions, {ENDPOINT}"):
            await service.create_batch(OWNER, request)
        with pytest.raises(BatchRequestError, match="completion_window"):
            await service.create_batch(OWNER, wanted(file, "forever"))
        with pytest.raises(NotFoundError):
            await service.create_batch(OWNER, wanted("file-unknown"))
        await service.create_batch(OWNER, wanted(file))
        with pytest.raises(TooManyError):
            await service.create_batch(OWNER, wanted(file))


async def test_pages(tmp_path: Path) -> None:
    async with (scene := await opened(tmp_path)).service as service:
        ids = [(await scene.create(lines(1))).id for _ in range(5)]
        page = await service.list_batches(OWNER, limit=2)
        assert [batch.id for batch in page.data] == ids[:2:-1]
        assert (page.first_id, page.last_id, page.has_more) == (ids[4], ids[3], True)
        page = await service.list_batches(OWNER, after=ids[1], limit=2)
        assert ([batch.id for batch in page.data], page.has_more) == ([ids[0]], False)
        empty = await service.list_batches("somebody else")
        assert (empty.data, empty.first_id, empty.has_more) == ([], None, False)
        files = await list_files(service, OWNER, limit=1, order="asc", purpose="batch")
        assert (len(files.data), files.has_more) == (1, True)
        assert (await list_files(service, OWNER, purpose="vision")).data == []
        with pytest.raises(NotFoundError):
            await service.list_batches("somebody else", after=ids[0])
        for batch_id in ids:
            await scene.ends(batch_id)
