"""Uploads hold back while online requests are served, and only then."""

from __future__ import annotations

import asyncio
from pathlib import Path

from batch.scenarios import Scene, opened

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


async def test_an_upload_goes_on_at_once_when_the_online_requests_are_done(tmp_path: Path) -> None:
    scene = await opened(tmp_path, busy_upload_bytes_per_s=1)
    scene.backend.is_online_busy = True
    async with scene.service:
        upload = asyncio.create_task(scene.upload(bytes(SIZE_BYTES)))
        path = tmp_path / "files"
        while not any(file.stat().st_size for file in path.iterdir()):
            await asyncio.sleep(0.001)
        scene.backend.is_online_busy = False
        scene.clock.advance(SIZE_BYTES)  # What is held is held; the rest is not.
        assert (await upload).bytes == SIZE_BYTES
