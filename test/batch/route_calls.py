"""What one does with the routes, through OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types import Batch

from batch.live_app import LiveApp
from batch.scenarios import FINAL
from batch.scripted_backend import ENDPOINT
from waiting import eventually


def upload(client: openai.OpenAI, content: bytes, **options: Any) -> str:
    return client.files.create(file=("in.jsonl", content), purpose="batch", **options).id


def create(
    client: openai.OpenAI,
    content: bytes,
    window: Any = "24h",
    endpoint: Any = ENDPOINT,
    **options: Any,
) -> Batch:
    return client.batches.create(
        input_file_id=upload(client, content),
        endpoint=endpoint,
        completion_window=window,
        **options,
    )


def until(client: openai.OpenAI, batch_id: str, *statuses: str, some_done: bool = False) -> Batch:
    """Wait for one of ``statuses``, and for a result if ``some_done``."""

    def look() -> Batch | None:
        batch = client.batches.retrieve(batch_id)
        if batch.status in statuses and not (some_done and batch.output_file_id is None):
            return batch
        assert batch.status not in FINAL, batch
        return None

    return eventually(look)


def engine_has(app: LiveApp, count: int) -> None:
    eventually(lambda: len(app.backend.in_flight) == count)


def finish(app: LiveApp, *custom_ids: str) -> None:
    for custom_id in custom_ids:
        app.in_loop(lambda custom_id=custom_id: app.backend.held(custom_id).finish())


def records(client: openai.OpenAI, *file_ids: str | None) -> dict[str, dict[str, Any]]:
    """The records of all files; a line that has two fails the test."""
    found: dict[str, dict[str, Any]] = {}
    for file_id in filter(None, file_ids):
        for text in client.files.content(file_id).text.splitlines():
            record = json.loads(text)
            assert record["custom_id"] not in found
            found[record["custom_id"]] = record
    return found


def completed(client: openai.OpenAI, batch_id: str) -> dict[str, dict[str, Any]]:
    """The records of a batch once it is complete."""
    batch = until(client, batch_id, "completed")
    return records(client, batch.output_file_id, batch.error_file_id)


def answer_in(body: dict[str, Any]) -> str:
    if "output" in body:
        return str(body["output"][0]["content"][0]["text"])
    choice = body["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def texts(records: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: answer_in(record["response"]["body"]) for name, record in records.items()}


def refused(
    caught: pytest.ExceptionInfo[openai.APIStatusError], status: int, code: str, param: str | None
) -> None:
    """The error is one that OpenAI's client understands."""
    error = caught.value
    assert (error.status_code, error.code, error.param) == (status, code, param)
    assert error.type == ("server_error" if status >= 500 else "invalid_request_error")
    assert error.body["message"]  # type: ignore[index, call-overload]
