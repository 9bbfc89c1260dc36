"""What one does with the routes, through OpenAI's own client."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest
from openai.types import Batch

from batch.live_app import LiveApp
from batch.scenarios import FINAL
from batch.scripted_backend import ENDPOINT
from waiting import GIVE_UP_S, eventually


def upload(client: openai.OpenAI, content: bytes, **options: Any) -> str:
    return client.files.create(file=("in.jsonl", content), purpose="batch", **options).id


def create(client: openai.OpenAI, content: bytes, window: Any = "24h", **options: Any) -> Batch:
    return client.batches.create(
        input_file_id=upload(client, content),
        endpoint=ENDPOINT,
        completion_window=window,
        **options,
    )


def until(client: openai.OpenAI, batch_id: str, *statuses: str) -> Batch:
    give_up_s = time.monotonic() + GIVE_UP_S
    while (batch := client.batches.retrieve(batch_id)).status not in statuses:
        assert batch.status not in FINAL, batch
        assert time.monotonic() < give_up_s, batch
        time.sleep(0.01)
    return batch


def engine_has(app: LiveApp, count: int) -> None:
    eventually(lambda: len(app.backend.in_flight) == count)


def finish(app: LiveApp, *custom_ids: str) -> None:
    for custom_id in custom_ids:
        app.in_loop(lambda custom_id=custom_id: app.backend.held(custom_id).finish())


def records(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    found = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    return {record["custom_id"]: record for record in found}


def refused(
    caught: pytest.ExceptionInfo[openai.APIStatusError], status: int, code: str, param: str | None
) -> None:
    """The error is one that OpenAI's client understands."""
    error = caught.value
    assert (error.status_code, error.code, error.param) == (status, code, param)
    assert error.type == ("server_error" if status >= 500 else "invalid_request_error")
    assert error.body["message"]  # type: ignore[index, call-overload]
