"""What one owner may have, and that the others get theirs."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch.scenarios import Scene, lines, opened, wanted
from batch.scripted_backend import ScriptedBackend
from sglang_coserve.batch.errors import ConflictError, QuotaError, TooManyError
from sglang_coserve.batch.file_store import Transfers
from sglang_coserve.errors import StorageError

KIB = 1 << 10
MIB = 1 << 20


async def test_one_owner_cannot_take_all_batches(tmp_path: Path) -> None:
    scene = await opened(
        tmp_path,
        ScriptedBackend(holds=True),
        max_active_batches=4,
        max_active_batches_per_owner=2,
    )
    async with scene.service as service:
        first = await scene.create(lines(1), owner="greedy")
        await scene.create(lines(1), owner="greedy")
        with pytest.raises(TooManyError, match="2 batches of this key are unfinished, and 2 more"):
            await scene.create(lines(1), owner="greedy")
        for _ in range(2):
            await scene.create(lines(1), owner="modest")
        with pytest.raises(TooManyError, match="0 more could be of all keys"):
            await scene.create(lines(1), owner="third")
        await service.change_batch("greedy", first.id, "cancel")
        await scene.reaches(first.id, "cancelled", owner="greedy")
        await scene.create(lines(1), owner="third")


async def test_by_default_an_owner_leaves_as_many_batches_as_it_has(tmp_path: Path) -> None:
    scene = await opened(tmp_path, ScriptedBackend(holds=True), max_active_batches=9)
    async with scene.service:
        had: dict[str, int] = {}
        for owner in ("first", "second", "third", "fourth"):
            had[owner] = 0
            with pytest.raises(TooManyError):
                while True:
                    await scene.create(lines(1), owner=owner)
                    had[owner] += 1
        assert had == {"first": 5, "second": 2, "third": 1, "fourth": 1}


async def fed(chunks: asyncio.Queue[bytes]) -> AsyncIterator[bytes]:
    """An upload that comes as the test says; an empty chunk ends it."""
    while chunk := await chunks.get():
        yield chunk


class TestQuota:
    async def test_uploads_at_the_same_time_count_together(self, tmp_path: Path) -> None:
        scene = await opened(tmp_path, max_stored_bytes_per_owner=4 * MIB)
        async with scene.service as service:
            await scene.upload(bytes(MIB))
            queues: list[asyncio.Queue[bytes]] = [asyncio.Queue() for _ in range(8)]
            uploads = [
                asyncio.create_task(service.create_file("owner", "in.jsonl", fed(queue)))
                for queue in queues
            ]
            for _ in range(4):
                for queue in queues:
                    queue.put_nowait(bytes(256 * KIB))
            await scene.clock.until(
                lambda: any(each.done() and each.exception() for each in uploads)
            )
            # Nobody else's matter.
            await scene.upload(bytes(3 * MIB), "other")
            for queue in queues:
                queue.put_nowait(b"")
            results = await asyncio.gather(*uploads, return_exceptions=True)
            refused = [result for result in results if isinstance(result, BaseException)]
            assert all(isinstance(error, QuotaError) for error in refused)
            stored = await stored_bytes(scene)
            assert stored <= 4 * MIB
            on_disk = sum(file.stat().st_size for file in (tmp_path / "files").iterdir())
            assert on_disk == stored + 3 * MIB, "a refused upload leaves nothing"
            # What was given back can be used.
            for file in (await service.list_files("owner")).data:
                await service.delete_file("owner", file.id)
            await scene.upload(bytes(4 * MIB))
            with pytest.raises(QuotaError, match="delete files"):
                await scene.upload(b"x")

    async def test_empty_files_count(self, tmp_path: Path) -> None:
        scene = await opened(tmp_path, max_files_per_owner=3)
        async with scene.service as service:
            results = await asyncio.gather(
                *(scene.upload(b"") for _ in range(6)), return_exceptions=True
            )
            refused = [result for result in results if isinstance(result, BaseException)]
            assert all(isinstance(error, QuotaError) for error in refused)
            files = (await service.list_files("owner")).data
            assert len(files) + len(refused) == 6
            assert 1 <= len(files) <= 3
            for _ in range(3 - len(files)):
                await scene.upload(b"")
            with pytest.raises(QuotaError, match="3 files"):
                await scene.upload(b"")
            with pytest.raises(QuotaError, match="3 files"):
                await service.create_batch("owner", wanted(files[0].id))
            await scene.upload(b"", "other")
            await service.delete_file("owner", files[0].id)
            await scene.upload(b"")

    async def test_results_are_kept_and_no_new_batch_starts(self, tmp_path: Path) -> None:
        content = lines(20)
        scene = await opened(tmp_path, max_stored_bytes_per_owner=len(content))
        async with scene.service as service:
            batch = await scene.create(content)
            done = await scene.ends(batch.id)
            assert done.request_counts.completed == 20
            assert len(await scene.records(done)) == 20
            with pytest.raises(QuotaError):
                await service.create_batch("owner", wanted(batch.input_file_id))
            with pytest.raises(QuotaError):
                await scene.upload(b"x")
            assert done.output_file_id is not None
            await service.delete_file("owner", done.output_file_id)
            again = await service.create_batch("owner", wanted(batch.input_file_id))
            assert (await scene.ends(again.id)).status == "completed"

    async def test_by_default_an_owner_leaves_as_much_as_it_takes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On a disk of 8 MiB: half for one, half of the rest for the next."""
        scene = await opened(tmp_path, min_free_bytes=1)
        files = tmp_path / "files"

        def free_bytes(_: object, wanted_bytes: int) -> int:
            return 8 * MIB - sum(file.stat().st_size for file in files.iterdir())

        kind = type(scene.service.context.directory)
        monkeypatch.setattr(kind, "free_bytes", free_bytes)
        async with scene.service:
            await scene.upload(bytes(4 * MIB), "first")
            with pytest.raises(QuotaError, match="still free"):
                await scene.upload(bytes(MIB), "first")
            await scene.upload(bytes(2 * MIB), "second")
            with pytest.raises(QuotaError):
                await scene.upload(bytes(MIB), "second")
            await scene.upload(bytes(MIB), "third")

    async def test_a_batch_on_a_full_disk_is_no_matter_of_its_owners_quota(
        self, tmp_path: Path
    ) -> None:
        scene = await opened(tmp_path)
        async with scene.service as service:
            file = await scene.upload(lines(1))
            object.__setattr__(service.context.limits, "min_free_bytes", 1 << 60)
            with pytest.raises(StorageError, match="disk is full"):
                await service.create_batch("owner", wanted(file))
            shutil.rmtree(tmp_path)
            with pytest.raises(StorageError, match="No such file"):
                await service.create_batch("owner", wanted(file))


async def stored_bytes(scene: Scene) -> int:
    return sum(file.bytes for file in (await scene.service.list_files("owner")).data)


def test_one_call_at_a_time_works_on_the_same_object() -> None:
    transfers = Transfers("uploads", 8)
    with transfers.one("a", of="upload_1"):
        with (
            pytest.raises(ConflictError, match="wait for its answer"),
            transfers.one("a", of="upload_1"),
        ):
            pass
        with transfers.one("a", of="upload_2"), transfers.one("b", of="upload_1"):
            assert transfers.count == 3
    with transfers.one("a", of="upload_1"):
        assert transfers.count == 1


@given(calls=st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_places_are_given_back(calls: list[tuple[str, bool]]) -> None:
    transfers = Transfers("uploads", 5)
    held: dict[str, list[object]] = {"a": [], "b": [], "c": []}
    for owner, is_begin in calls:
        if is_begin:
            place = transfers.one(owner)
            total = sum(map(len, held.values()))
            if len(held[owner]) >= 5 - total:
                with pytest.raises(TooManyError, match="under way"):
                    place.__enter__()
                continue
            place.__enter__()
            held[owner].append(place)
        elif held[owner]:
            held[owner].pop().__exit__(None, None, None)  # type: ignore[attr-defined]
        assert transfers.count == sum(map(len, held.values()))
