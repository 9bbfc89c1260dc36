"""Lines with a common beginning come together, each once."""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Collection
from contextlib import closing
from dataclasses import asdict
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch.scenarios import opened
from batch.scripted_backend import ScriptedBackend
from sglang_coserve.jsonl.check_file import CheckLimits
from sglang_coserve.jsonl.lines import (
    PrefixSorter,
    read_lines,
    read_order,
)
from sglang_coserve.jsonl.request_line import parse_json, prefix_key
from sglang_coserve.lines.background import WorkerThreads
from sglang_coserve.lines.line_source import LineSource

MOST_KEY_BYTES = 4 * 64
COMMON = "You are a lighthouse keeper who answers in one sentence. " * 20


def chat(system: str, user: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"messages": messages}


BODIES = (
    lambda text: {"prompt": text},
    lambda text: {"prompt": [text, "another"]},
    lambda text: {"prompt": [ord(character) for character in text]},
    lambda text: {"input": text, "instructions": "Be kind."},
    lambda text: {"input": [{"role": "user", "content": [{"type": "input_text", "text": text}]}]},
    lambda text: chat(text, "hello"),
    lambda text: chat("", [{"type": "text", "text": text}]),
    lambda text: {**chat("short", text), "tools": [{"type": "function", "name": "light"}]},
)


def shared_bytes(first: bytes, second: bytes) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))


@pytest.mark.parametrize("body", BODIES)
def test_keys_share_what_prompts_share(body: Any) -> None:
    common = COMMON[:900]  # As token ids 7,200 bytes of the 8,192 that count.
    one, other = prefix_key(body(common + "one")), prefix_key(body(common + "other"))
    assert one != other
    # All but the last block of what they share; 4 bytes for each of 128.
    assert shared_bytes(one, other) >= 4 * (len(common) // 128 - 1)
    assert shared_bytes(one, prefix_key(body("x" + COMMON))) < 8
    assert len(prefix_key(body(COMMON * 100))) == MOST_KEY_BYTES


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = ("messages", "prompt", "input", "instructions", "tools")


@given(st.dictionaries(st.sampled_from(NAMES), json_values))
def test_every_body_has_a_key(body: dict[str, Any]) -> None:
    key = prefix_key(body)
    assert len(key) <= MOST_KEY_BYTES
    assert key == prefix_key(json.loads(json.dumps(body)))


def request(number: int, prompt: str) -> bytes:
    fields = {"custom_id": str(number), "method": "POST", "url": "/v1/completions"}
    return json.dumps(fields | {"body": {"prompt": prompt}}).encode()


def shuffled(groups: int, size: int, seed: int = 1) -> list[bytes]:
    prompts = [f"{group:05d} {COMMON} question {n}" for group in range(groups) for n in range(size)]
    random.Random(seed).shuffle(prompts)
    return [request(number, prompt) for number, prompt in enumerate(prompts, 1)]


def written(source: bytes) -> io.BytesIO:
    order = io.BytesIO()
    with closing(PrefixSorter()) as sorter:
        for line in read_lines(io.BytesIO(source), 1 << 20):
            sorter.add(line, parse_json(line.content or b"")["body"])
        sorter.write(order)
    return order


def order_of(source: bytes) -> list[tuple[int, int]]:
    order = written(source)
    return list(read_order(order, 0, 100_000))


def entries_of(order: Path) -> list[tuple[int, int]]:
    with order.open("rb") as file:
        return list(read_order(file, 0, 100_000))


def group_of(line: bytes) -> str:
    return str(json.loads(line)["body"]["prompt"])[:5]


def changes(lines: list[bytes]) -> int:
    return sum(one != other for one, other in pairwise(map(group_of, lines)))


def test_groups_come_together_in_the_order_of_their_first_lines() -> None:
    lines = shuffled(groups=200, size=10)
    content = b"\n".join(lines) + b"\n"
    entries = order_of(content)
    ordered = [content[offset:].split(b"\n", 1)[0] for offset, _ in entries]
    assert sorted(ordered) == sorted(lines)
    assert changes(ordered) == 199
    assert group_of(ordered[0]) == group_of(lines[0])
    firsts = list(dict.fromkeys(map(group_of, lines)))
    assert list(dict.fromkeys(map(group_of, ordered))) == firsts
    for _, group in groupby(ordered, group_of):
        keys = [prefix_key(json.loads(each)["body"]) for each in group]
        assert keys == sorted(keys)
    assert list(read_order(written(content), 1990, 20)) == entries[1990:]


async def numbers_of(
    directory: Path, lines: list[bytes], finished: Collection[int] = ()
) -> list[int]:
    """Numbers of the lines of ``in`` that a source yields beside ``order``, as they come."""
    threads, numbers = WorkerThreads("test", 1), []
    source = LineSource(
        directory / "in",
        1 << 20,
        lambda number: number not in finished,
        threads,
        directory / "order",
    )
    async for line in source:
        assert line.content == lines[line.number - 1]
        assert line.offset == sum(len(each) + 1 for each in lines[: line.number - 1])
        numbers.append(line.number)
    await threads.close()
    return numbers


@settings(max_examples=25)
@given(finished=st.sets(st.integers(1, 600), max_size=300), seed=st.integers(0, 99))
async def test_a_source_yields_each_line_once_in_the_order_if_there_is_one(
    tmp_path_factory: pytest.TempPathFactory, finished: set[int], seed: int
) -> None:
    directory = tmp_path_factory.mktemp("source")
    lines = shuffled(groups=60, size=10, seed=seed)
    content = b"\n".join(lines) + b"\n"
    (directory / "in").write_bytes(content)
    unfinished = [number for number in range(1, 601) if number not in finished]
    assert await numbers_of(directory, lines, finished) == unfinished
    (directory / "order").write_bytes(written(content).getvalue())
    wanted = [number for _, number in order_of(content) if number not in finished]
    assert await numbers_of(directory, lines, finished) == wanted


def checked(directory: Path, **limits: Any) -> dict[str, Any]:
    """What the process that checks ``in`` says of it, with its peak memory in KiB."""
    given = asdict(CheckLimits(100_000, 1 << 20, max_faults=5, context_tokens=4096)) | limits
    program = (
        "import sys; from pathlib import Path;"
        "from sglang_coserve.jsonl.check_file import main;"
        "main(*sys.argv[1:]); sys.stdout.flush();"
        # ru_maxrss would be that of the process that forked this one, if it has more.
        "print('', Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    )
    arguments = (directory / "in", "/v1/completions", json.dumps(given), directory / "order")
    command = [sys.executable, "-c", program, *map(str, arguments)]
    environment = {**os.environ, "SQLITE_TMPDIR": str(directory)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    report, peak_kib = done.stdout.rsplit(" ", 1)
    return {**json.loads(report), "peak_kib": int(peak_kib)}


def test_the_check_writes_the_order_of_many_good_lines_whole_and_private(tmp_path: Path) -> None:
    lines = shuffled(groups=100, size=6)
    content = b"\n".join([*lines[:300], b"  ", *lines[300:]])
    (tmp_path / "in").write_bytes(content)
    assert checked(tmp_path, max_unordered_lines=600)["faults"] == []
    assert not (tmp_path / "order").exists()
    assert checked(tmp_path, max_unordered_lines=599)["requests"] == 600
    assert (tmp_path / "order").stat().st_mode & 0o777 == 0o600
    ordered = [content[at:].split(b"\n", 1)[0] for at, _ in entries_of(tmp_path / "order")]
    assert sorted(ordered) == sorted(lines)
    assert changes(ordered) == 99
    (tmp_path / "order").unlink()
    (tmp_path / "in").write_bytes(content + b"\nno JSON")
    assert checked(tmp_path)["faults"]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_memory_is_bounded(tmp_path: Path) -> None:
    prompts = (f"{n:08d}" + "x" * 8192 for n in range(30_000))
    with (tmp_path / "in").open("wb") as file:
        for number, prompt in enumerate(prompts):
            file.write(request(number, prompt) + b"\n")
    assert checked(tmp_path)["peak_kib"] < 200_000  # Of a file of 250,000.
    assert len(entries_of(tmp_path / "order")) == 30_000


async def test_a_batch_is_served_in_the_order_and_after_a_restart_too(tmp_path: Path) -> None:
    """The engine has 4 lines at a time."""
    lines = shuffled(groups=100, size=10)

    def prompts(backend: ScriptedBackend) -> list[str]:
        return [request.body["prompt"][:5] for request in backend.started]

    scene = await opened(tmp_path, ScriptedBackend(holds=True), max_in_flight=4)
    batch = await scene.create(b"\n".join(lines) + b"\n")
    await scene.in_flight(4)
    while len(scene.backend.started) < 600:
        scene.backend.finish_all()
        await asyncio.sleep(0)
    served = prompts(scene.backend)[:600]
    assert sum(one != other for one, other in pairwise(served)) <= 70
    await scene.service.close()
    batch_id = str(batch.id)
    scene = await opened(tmp_path, ScriptedBackend(), max_in_flight=4)
    batch = await scene.ends(batch_id)
    assert (batch.status, len(await scene.records(batch))) == ("completed", 1000)
    served = prompts(scene.backend)
    assert sum(one != other for one, other in pairwise(served)) <= 100
    assert list((tmp_path / "order").iterdir()) == []
    await scene.service.close()


@settings(max_examples=60)
@given(data=st.data())
async def test_a_damaged_order_is_no_order(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Cut anywhere, with zeros or other bytes anywhere: each line comes once, with its number."""
    directory = tmp_path_factory.mktemp("order")
    lines = shuffled(groups=40, size=10)
    (directory / "in").write_bytes(b"\n".join(lines) + b"\n")
    content = bytearray(written((directory / "in").read_bytes()).getvalue())
    size_bytes = data.draw(st.sampled_from([len(content), 0, 12, 4096, 2412, len(content) - 12]))
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(content))] * 2)))
    content[start:end] = data.draw(st.sampled_from([b"\0", b"\1", b"\xff"])) * (end - start)
    (directory / "order").write_bytes(content[:size_bytes])
    assert sorted(await numbers_of(directory, lines)) == list(range(1, 401))
