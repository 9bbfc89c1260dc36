"""The unfinished lines of an input, read a little ahead."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_coserve.errors import StorageError
from sglang_coserve.lines.line_source import LineBitmap, LineSource
from sglang_coserve.lines.worker_threads import WorkerThreads


@settings(deadline=None, max_examples=50)
@given(
    texts=st.lists(st.sampled_from([b"", b" ", b"a", b"bb", b"c" * 20]), max_size=40),
    finished=st.sets(st.integers(1, 40)),
    ending=st.sampled_from([b"\n", b"\r\n"]),
)
async def test_a_source_yields_what_is_not_finished(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[bytes],
    finished: set[int],
    ending: bytes,
) -> None:
    path = tmp_path_factory.mktemp("source") / "in"
    path.write_bytes(b"".join(text + ending for text in texts))
    bitmap = LineBitmap()
    for number in finished:
        bitmap.add(number)
    threads = WorkerThreads("test", 1)
    source = LineSource(path, 100, lambda line: line not in bitmap, threads)
    found = [(line.number, line.content) async for line in source]
    await threads.close()
    assert found == [
        (number, text)
        for number, text in enumerate(texts, 1)
        if text.strip() and number not in finished
    ]


async def test_a_source_reads_only_a_little_ahead(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"x" * 99 + b"\n" + b"y" * 3_000_000 + b"\n" + (b"z" * 99 + b"\n") * 50_000)
    threads = WorkerThreads("test", 1)
    source = LineSource(path, 4_000_000, lambda _: True, threads)
    numbers = []
    async for line in source:
        numbers.append(line.number)
        assert len(source._ahead) <= 256
        assert sum(len(ahead.content) for ahead in source._ahead) <= 3_000_100
    assert numbers == list(range(1, 50_003))
    path.unlink()
    with pytest.raises(StorageError, match="No such file"):
        await anext(LineSource(path, 100, lambda _: True, threads))
    await threads.close()
