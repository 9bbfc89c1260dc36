"""Uploads, reads and deletions, and what a crash in the middle of one leaves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from batch.scenarios import OWNER, Scene, lines, opened, stream, wanted
from sglang_coserve.batch.errors import ConflictError, NotFoundError
from sglang_coserve.batch.schemas import ExpiresAfter
from sglang_coserve.errors import StorageError
from sglang_coserve.web.keys import owner_of
from waiting import until

HOUR = ExpiresAfter(anchor="created_at", seconds=3600)


def stored(directory: Path) -> list[str]:
    """Names of the files whose bytes are there."""
    return sorted(path.name for path in (directory / "files").iterdir())


def in_doubt(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "in_doubt").iterdir())


def test_owners() -> None:
    assert owner_of(None) == owner_of("")
    assert len({owner_of(None), owner_of("a"), owner_of("b")}) == 3
    assert "secret" not in owner_of("secret")


async def test_an_upload_never_fills_the_disk(tmp_path: Path) -> None:
    async with (await opened(tmp_path, min_free_bytes=1 << 60)).service as service:
        with pytest.raises(StorageError, match="disk is full"):
            await service.create_file(OWNER, "a", stream(b"x"))
    assert stored(tmp_path) == in_doubt(tmp_path) == []


async def test_files_expire_unless_a_batch_needs_them(tmp_path: Path) -> None:
    scene = await opened(tmp_path, input_retention_s=7200)
    scene.backend.holds = True
    async with scene.service as service:
        short = await service.create_file(OWNER, "a", stream(lines(1)), lambda: HOUR)
        used = await service.create_file(OWNER, "a", stream(lines(1)), lambda: HOUR)
        long = await scene.upload(lines(1))
        assert short.expires_at - short.created_at == 3600
        assert long.expires_at - long.created_at == 7200
        batch = await service.create_batch(OWNER, wanted(used))
        await scene.in_flight(1)
        scene.clock.advance(3601)
        with pytest.raises(NotFoundError):
            await service.retrieve_file(OWNER, short.id)
        assert [f.id for f in (await service.list_files(OWNER)).data] == [long.id]
        await scene.clock.until(lambda: stored(tmp_path) == sorted([used.id, long.id]))
        scene.backend.held("id-1").finish()
        assert (await scene.ends(batch.id)).status == "completed"
        scene.clock.advance(61)
        await scene.clock.until(lambda: used.id not in stored(tmp_path))


async def test_a_file_in_use_cannot_be_deleted(tmp_path: Path) -> None:
    scene = await opened(tmp_path)
    scene.backend.holds = True
    async with scene.service as service:
        batch = await scene.create(lines(2))
        await scene.in_flight(2)
        scene.backend.held("id-1").finish()
        await scene.clock.until(lambda: len(stored(tmp_path)) == 2)
        running = await scene.reaches(batch.id, "in_progress")
        for file_id in stored(tmp_path):
            with pytest.raises((ConflictError, NotFoundError)):
                await service.delete_file(OWNER, file_id)
        scene.backend.held("id-2").finish()
        done = await scene.ends(batch.id)
        assert done.output_file_id
        for file_id in (running.input_file_id, done.output_file_id):
            assert (await service.delete_file(OWNER, file_id)).deleted
    assert stored(tmp_path) == in_doubt(tmp_path) == []


async def test_a_caller_who_hangs_up_leaves_no_file_open(tmp_path: Path) -> None:
    def is_open() -> bool:
        links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return any(link.parent == tmp_path / "files" for link in links)

    async with (scene := await opened(tmp_path)).service as service:
        file = await scene.upload(bytes(9))
        for begun in (
            lambda: scene.content(file.id),
            lambda: service.create_file(OWNER, "f", stream(bytes(9))),
        ):
            for turns in range(12):
                call = asyncio.ensure_future(begun())
                for _ in range(turns):
                    await asyncio.sleep(0.0005)
                call.cancel()
                await asyncio.wait({call})
                assert not is_open(), turns


async def test_files_that_nobody_marked_are_left_alone(tmp_path: Path) -> None:
    """A database that was restored from a backup must not cost the files it does not know."""
    async with (scene := await opened(tmp_path)).service:
        await scene.upload(lines(1))
    for path in tmp_path.glob("coserve.sqlite*"):
        path.unlink()
    before = stored(tmp_path)
    async with (await opened(tmp_path)).service:
        assert stored(tmp_path) == before


KIB = 1 << 10
SIZE_BYTES = 2048 * KIB


async def held_s(scene: Scene, *contents: bytes) -> float:
    """How long it takes to upload ``contents`` at the same time."""
    began_s = scene.clock.now_s()
    uploads = [asyncio.create_task(scene.upload(content)) for content in contents]
    if scene.backend.is_online_busy:
        await scene.clock.until(lambda: all(upload.done() for upload in uploads))
    for upload, content in zip(uploads, contents, strict=True):
        assert (await upload).bytes == len(content)
    return scene.clock.now_s() - began_s


async def test_uploads_share_a_rate_beside_online_requests(tmp_path: Path) -> None:
    scene = await opened(tmp_path, busy_upload_bytes_per_s=512 * KIB)
    content = bytes(SIZE_BYTES)
    async with scene.service:
        assert await held_s(scene, content) == 0  # No online requests: no time needs to pass.
        scene.backend.is_online_busy = True
        alone_s = await held_s(scene, content)
        assert alone_s >= SIZE_BYTES / (512 * KIB)
        assert await held_s(scene, content, content) >= 2 * SIZE_BYTES / (512 * KIB)


async def test_owners_share_the_rate_of_uploads_however_many_they_send(tmp_path: Path) -> None:
    scene = await opened(tmp_path, busy_upload_bytes_per_s=512 * KIB)
    scene.backend.is_online_busy = True
    read = Counter[str]()

    async def pieces(owner: str, count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            read[owner] += 1
            yield bytes(256 * KIB)

    async with scene.service as service:
        flood = [
            asyncio.create_task(service.create_file("many", "f", pieces("many", 1000)))
            for _ in range(30)
        ]
        await scene.clock.until(lambda: read["many"] > 60)
        before = read["many"]
        one = asyncio.create_task(service.create_file("one", "f", pieces("one", 8)))
        await scene.clock.until(one.done)
        assert read["one"] == 8
        assert read["many"] - before <= 2 * 8 + 4
        for each in flood:
            each.cancel()
        await asyncio.gather(*flood, return_exceptions=True)


async def test_an_upload_goes_on_at_once_when_the_online_requests_are_done(tmp_path: Path) -> None:
    scene = await opened(tmp_path, busy_upload_bytes_per_s=1)
    scene.backend.is_online_busy = True
    async with scene.service:
        upload = asyncio.create_task(scene.upload(bytes(SIZE_BYTES)))
        path = tmp_path / "files"
        await until(lambda: any(file.stat().st_size for file in path.iterdir()))
        scene.backend.is_online_busy = False
        scene.clock.advance(SIZE_BYTES)  # What is held is held; the rest is not.
        assert (await upload).bytes == SIZE_BYTES
