"""15 MiB at every door of the real server: refused, or the fault of its line alone."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from batch.route_calls import completed
from srt.batch_server.deployment import API_KEY, Deployment, create, line, lines

LARGE = 15 << 20
TEXT = "the old mill, " * (LARGE // 14)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": TEXT}),
        ("/generate", {"input_ids": [1] * (LARGE // 3)}),
        ("/v1/completions", {"model": "small", "prompt": TEXT}),
        ("/v1/completions", {"model": "small", "prompt": TEXT, "service_tier": "flex"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 10_000}),
        ("/v1/messages", {"model": "small", "messages": [{"role": "user", "content": TEXT}]}),
    ],
    ids=["text", "ids", "completion", "flex", "chat", "messages", "anthropic"],
)
def test_a_body_that_is_too_large_is_refused(
    deployment: Deployment, path: str, body: dict[str, Any]
) -> None:
    answer = deployment.ask("POST", path, API_KEY, body)
    assert answer.status_code == 413
    assert "than" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [None] * 200_000}),
        ("/v1/completions", {"model": "small", "prompt": [None] * 200_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [None] * 200_000}]}),
    ],
)
def test_many_faults_are_told_in_few_words(
    deployment: Deployment, path: str, body: dict[str, Any]
) -> None:
    answer = deployment.ask("POST", path, API_KEY, body)
    assert answer.status_code == 400
    # Told one by one they would be half a gigabyte. The value at fault is told with each.
    assert answer.text.count("'loc'") < 50


def test_large_lines_fail_alone(client: openai.OpenAI) -> None:
    large = {
        "text": line("text", prompt=TEXT),
        "values": line("values", prompt=["a"] * 300_000),
        "token ids": line("token ids", prompt=[7] * 900_000),
        "faults": line("faults", prompt=[None] * 200_000),
        "long": line("long", prompt=TEXT[: 3 << 20]),
    }
    found = completed(client, create(client, lines(2) + "".join(large.values()).encode()).id)
    statuses = {name: record["response"]["status_code"] for name, record in found.items()}
    refused = {name: 400 if name in ("long", "faults") else 413 for name in large}
    assert statuses == {"id-0": 200, "id-1": 200, **refused}
