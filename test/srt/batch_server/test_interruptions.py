"""kill -9, SIGTERM and a full disk while the real server runs batches; another policy each time."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path

import openai
import pytest
from openai.types import Batch

from batch.route_calls import completed, records, texts, until
from sglang_coserve.lines.journal import TokenJournal
from sglang_coserve.lines.line_source import LineBitmap
from sglang_coserve.lines.result_record import batch_tag, record_identity
from srt.batch_server.deployment import Deployment, create, extra_of, lines
from waiting import GIVE_UP_S, eventually

MIB = 1 << 20
NUM_LINES, NUM_TOKENS = 12, 400
"""Three times as many lines as may run at once."""

STEP_S = 0.02
"""The last lines end 16 s after the first ones, or later."""

CONTENT = lines(NUM_LINES, NUM_TOKENS, return_token_ids=True, temperature=1.0, seed=7)
"""Sampled with a seed: interrupted lines end as undisturbed ones do."""


@pytest.fixture(scope="module")
def expected(deployment: Deployment) -> dict[str, str]:
    """What an uninterrupted batch of ``CONTENT`` answers."""
    with deployment.client() as client:
        return texts(completed(client, create(client, CONTENT).id))


def journal_of(path: Path, model: str) -> TokenJournal:
    return TokenJournal(path, model, compact_bytes=MIB)


def unfinished(
    deployment: Deployment, batch: Batch, model: str, scratch: Path
) -> dict[int, tuple[int, ...]]:
    """Journaled tokens of the lines that have no record, as a server that starts now finds them."""
    finished = LineBitmap()
    output = (deployment.data / "files" / batch.output_file_id).read_bytes()
    for record in output.splitlines(keepends=True):
        if (found := record_identity(record)) is not None:
            tag, number = found
            assert tag == batch_tag(batch.id)
            finished.add(number)
    # A copy: reading a journal mends it.
    copy = shutil.copy(deployment.data / "journal" / batch.id, scratch / "journal")
    journal = journal_of(Path(copy), model)
    journal.load(finished)
    tokens = {number: journal.tokens(number) for number in range(1, NUM_LINES + 1)}
    return {number: ids for number, ids in tokens.items() if ids}


def test_a_killed_servers_lines_go_on_after_their_journaled_tokens(
    deployment: Deployment,
    client: openai.OpenAI,
    expected: dict[str, str],
    tmp_path: Path,
) -> None:
    """To see it, one line finds tokens in the journal that it would never have chosen."""
    model = deployment.status()["batch_api"]["model"]
    with deployment.slowly(STEP_S):
        batch = create(client, CONTENT)
        batch = until(client, batch.id, "in_progress", some_done=True)
        eventually(
            lambda: any(
                len(ids) >= 32 for ids in unfinished(deployment, batch, model, tmp_path).values()
            )
        )
        deployment.kill()
    tokens = unfinished(deployment, batch, model, tmp_path)
    number = max(tokens, key=lambda number: len(tokens[number]))
    foreign = tuple(islice(cycle((7, 8, 9)), len(tokens[number])))
    path = deployment.data / "journal" / batch.id
    path.unlink()
    journal = journal_of(path, model)
    for each, ids in tokens.items():
        journal.add(each, foreign if each == number else ids)
    journal.write(*journal.take_unwritten())

    deployment.start()
    found = completed(client, batch.id)
    altered = found.pop(f"id-{number - 1}")["response"]["body"]["choices"][0]["token_ids"]
    assert tuple(altered[: len(foreign)]) == foreign
    assert len(altered) == NUM_TOKENS
    assert texts(found).items() <= expected.items()
    assert len(found) == NUM_LINES - 1
    usage = client.batches.retrieve(batch.id).usage
    assert usage.output_tokens == NUM_LINES * NUM_TOKENS


def test_a_clean_stop_suspends_batches_and_loses_nothing(
    deployment: Deployment, client: openai.OpenAI, expected: dict[str, str]
) -> None:
    paused = create(client, lines(1))
    client.post(f"/batches/{paused.id}/pause", cast_to=Batch)
    with deployment.slowly(STEP_S):
        batch = create(client, CONTENT)
        until(client, batch.id, "in_progress", some_done=True)
        with client.completions.create(
            model="small",
            prompt="An online request",
            max_tokens=150,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        ) as answer:
            next(answer)
            os.kill(deployment.pid, signal.SIGTERM)
            *_, last = answer
            assert last.usage.completion_tokens == 150
    assert deployment.wait(GIVE_UP_S) == 0
    deployment.stop()
    assert "batches stop where they are" in deployment.log.read_text()
    deployment.start()
    # Of what the engine reaches, this server has seen little or nothing.
    resumed = client.post(f"/batches/{paused.id}/resume", cast_to=Batch)
    assert extra_of(resumed)["eta"] is not None
    # It goes on at once, and may have ended before we can ask.
    assert client.batches.retrieve(batch.id).status in ("in_progress", "finalizing", "completed")
    assert texts(completed(client, batch.id)) == expected
    done = client.batches.retrieve(batch.id)
    assert done.request_counts is not None
    assert done.usage is not None


@contextmanager
def file_size_limit(deployment: Deployment, limit_bytes: int) -> Iterator[None]:
    """Within it no file of the server can grow beyond that, as on a disk that is full."""
    kind = resource.RLIMIT_FSIZE
    before = resource.prlimit(deployment.pid, kind, (limit_bytes, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.prlimit(deployment.pid, kind, before)


def test_a_full_disk_refuses_uploads(deployment: Deployment, client: openai.OpenAI) -> None:
    def large_files() -> list[str]:  # Batches of other tests may still write small ones.
        files = (deployment.data / "files").iterdir()
        return sorted(file.name for file in files if file.stat().st_size >= MIB)

    content = b"x" * (9 * MIB)
    before = large_files()
    with file_size_limit(deployment, 8 * MIB):
        with pytest.raises(openai.InternalServerError) as caught:
            client.files.create(file=("in.jsonl", content), purpose="batch")
        assert (caught.value.status_code, caught.value.code) == (507, "storage_failed")
        assert large_files() == before
        client.files.create(file=("in.jsonl", b"x"), purpose="batch")
    client.files.create(file=("in.jsonl", content), purpose="batch")


def test_a_batch_waits_for_a_full_disk(deployment: Deployment, client: openai.OpenAI) -> None:
    count = 600
    # Each answer repeats its prompt of 3 kB: more than may be written.
    content = lines(count, 1, prompt="word " * 600, echo=True)
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    with file_size_limit(deployment, MIB):
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        eventually(lambda: extra_of(client.batches.retrieve(batch.id))["warning"])
        assert client.batches.retrieve(batch.id).status in ("validating", "in_progress")
    done = until(client, batch.id, "completed")
    assert len(records(client, done.output_file_id)) == count
    assert extra_of(done)["warning"] is None
