"""The Batch API of the real server, with OpenAI's client: every state, kill -9, clean stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from sglang_coserve.local_server import LocalServer, free_port

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FINAL = ("completed", "failed", "expired", "cancelled")
GIVE_UP_S = 120
API_KEY = "secret"


def line(custom_id: str, max_tokens: Any = 8, url: str = COMPLETIONS) -> str:
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": custom_id}]}
        if url == CHAT
        else {"prompt": f"The {custom_id} of the old mill"}
    )
    body = {"model": "small", "temperature": 0, "ignore_eos": True, "max_tokens": max_tokens}
    fields = {"custom_id": custom_id, "method": "POST", "url": url, "body": body | prompt}
    return json.dumps(fields) + "\n"


def lines(count: int, max_tokens: int = 8, url: str = COMPLETIONS) -> bytes:
    return "".join(line(f"id-{n}", max_tokens, url) for n in range(count)).encode()


class Deployment:
    """A server that can be started again on what it has left."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.flags = [
            *("--model-path", str(model), "--dtype", "float32", "--api-key", API_KEY),
            *("--coserve-data-dir", str(directory / "data"), "--offline-max-running", "4"),
        ]
        self.log = directory / "server.log"
        self.server = LocalServer(self.flags, log_path=self.log, port=free_port())

    def client(self, api_key: str = API_KEY) -> openai.OpenAI:
        url = f"{self.server.base_url}/v1"
        return openai.OpenAI(base_url=url, api_key=api_key, max_retries=0, timeout=60)

    def kill(self) -> None:
        """End all of its processes at once, as a power failure does."""
        os.killpg(self.server.pid, signal.SIGKILL)
        self.server.stop()


@pytest.fixture(scope="module")
def deployment(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(small_model, tmp_path_factory.mktemp("server"))
    deployment.server.start()
    yield deployment
    deployment.server.stop()


@pytest.fixture
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with deployment.client() as client:
        yield client


def create(
    client: openai.OpenAI, content: bytes, window: Any = "24h", endpoint: Any = COMPLETIONS
) -> Batch:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window)


def until(client: openai.OpenAI, batch_id: str, *statuses: str, some_done: bool = False) -> Batch:
    give_up_s = time.monotonic() + GIVE_UP_S
    while True:
        batch = client.batches.retrieve(batch_id)
        if batch.status in statuses and not (some_done and batch.output_file_id is None):
            return batch
        assert batch.status not in FINAL, batch
        assert time.monotonic() < give_up_s, batch
        time.sleep(0.05)


def records(client: openai.OpenAI, *file_ids: str | None) -> dict[str, dict[str, Any]]:
    """The records of all files; a line that has two fails the test."""
    found: dict[str, dict[str, Any]] = {}
    for file_id in filter(None, file_ids):
        for text in client.files.content(file_id).text.splitlines():
            record = json.loads(text)
            assert record["custom_id"] not in found
            found[record["custom_id"]] = record
    return found


def text_of(record: dict[str, Any]) -> str:
    return str(record["response"]["body"]["choices"][0]["text"])


def test_a_batch_completes_as_the_routes_would_answer(client: openai.OpenAI) -> None:
    content = lines(5) + line("bad", max_tokens=-1).encode()
    batch = until(client, create(client, content).id, "completed")
    assert batch.request_counts is not None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (6, 5, 1)
    assert batch.usage is not None
    assert batch.usage.output_tokens == 40
    served = records(client, batch.output_file_id)
    for n in range(5):
        alone = client.completions.create(
            model="small",
            prompt=f"The id-{n} of the old mill",
            max_tokens=8,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert text_of(served[f"id-{n}"]) == alone.choices[0].text
    bad = records(client, batch.error_file_id)["bad"]
    assert bad["response"]["status_code"] == 400
    assert "max_" in bad["response"]["body"]["error"]["message"]


def test_chat_lines(client: openai.OpenAI) -> None:
    batch = until(client, create(client, lines(2, url=CHAT), endpoint=CHAT).id, "completed")
    for record in records(client, batch.output_file_id).values():
        assert record["response"]["body"]["choices"][0]["message"]["content"]


def test_a_malformed_file_fails(client: openai.OpenAI) -> None:
    batch = until(client, create(client, lines(1) + b"{bad\n").id, "failed")
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [error.line for error in batch.errors.data] == [2]


def test_cancelling_leaves_the_engine_idle(deployment: Deployment, client: openai.OpenAI) -> None:
    batch = create(client, lines(3) + lines(40, 400).replace(b"id-", b"long-"))
    until(client, batch.id, "in_progress", some_done=True)
    client.batches.cancel(batch.id)
    batch = until(client, batch.id, "cancelled")
    assert records(client, batch.output_file_id)
    give_up_s = time.monotonic() + GIVE_UP_S
    while True:
        answer = httpx.get(
            f"{deployment.server.base_url}/coserve/status",
            headers={"authorization": f"Bearer {API_KEY}"},
        ).json()
        offline = answer["replicas"][0]["offline"]
        if not offline["running"] and not offline["waiting"]:
            break
        assert time.monotonic() < give_up_s, offline
        time.sleep(0.1)


def test_a_window_expires(client: openai.OpenAI) -> None:
    batch = until(client, create(client, lines(60, 400), window="1s").id, "expired")
    expired = records(client, batch.error_file_id)
    done = records(client, batch.output_file_id)
    assert len(expired) + len(done) == 60
    assert {record["error"]["code"] for record in expired.values()} == {"batch_expired"}


def test_keys_are_those_of_every_route(deployment: Deployment) -> None:
    for api_key in ("wrong", "secre"):
        with deployment.client(api_key) as client, pytest.raises(openai.AuthenticationError):
            client.batches.list()
    bare = httpx.post(f"{deployment.server.base_url}/v1/files", content=b"x" * 100)
    assert bare.status_code == 401


def test_killed_and_started_again_every_line_has_one_answer(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    whole = until(client, create(client, lines(30, 64)).id, "completed")
    expected = {key: text_of(r) for key, r in records(client, whole.output_file_id).items()}
    batch = create(client, lines(30, 64))
    until(client, batch.id, "in_progress", some_done=True)
    deployment.kill()
    deployment.server.start()
    batch = until(client, batch.id, "completed")
    found = records(client, batch.output_file_id, batch.error_file_id)
    assert {key: text_of(record) for key, record in found.items()} == expected
    assert batch.usage is not None
    assert batch.usage.output_tokens == 30 * 64
    # What was before is still there.
    assert client.batches.retrieve(whole.id).status == "completed"


def test_a_clean_stop_does_not_wait_for_batches(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    batch = create(client, lines(500, 900))
    until(client, batch.id, "in_progress")
    deployment.server.stop()
    assert "batches stop where they are" in deployment.log.read_text()
    deployment.server.start()
    resumed = client.batches.retrieve(batch.id)
    assert resumed.status == "in_progress"
    client.batches.cancel(batch.id)
    batch = until(client, batch.id, "cancelled")
    assert batch.request_counts is not None
    assert batch.request_counts.failed == 0


def start(model: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_coserve.launch_server", "--model-path", str(model), *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def refused(done: subprocess.CompletedProcess[str], says: str) -> None:
    errors = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    assert done.returncode == 2
    assert len(errors) == 1
    assert says in errors[0]


def test_a_directory_that_cannot_be_used_stops_the_start(small_model: Path, tmp_path: Path) -> None:
    a_file = tmp_path / "file"
    a_file.write_text("")
    refused(start(small_model, "--coserve-data-dir", str(a_file)), "cannot use the data directory")


def test_a_corrupt_database_stops_the_start(small_model: Path, tmp_path: Path) -> None:
    (tmp_path / "coserve.sqlite").write_bytes(b"no database at all" * 1000)
    refused(start(small_model, "--coserve-data-dir", str(tmp_path)), "coserve.sqlite")


def test_a_directory_in_use_stops_the_start(
    deployment: Deployment, small_model: Path, tmp_path: Path
) -> None:
    data = deployment.flags[deployment.flags.index("--coserve-data-dir") + 1]
    refused(start(small_model, "--coserve-data-dir", data), "in use by another server")
