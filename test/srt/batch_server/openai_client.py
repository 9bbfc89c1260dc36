"""What a user's program does with the ``openai`` client of whatever version; run by path."""

from __future__ import annotations

import io
import json
import sys
import time
from typing import Any

import openai

TIERS = ("auto", "default", "flex", "scale", "priority", "fast")
MESSAGES: Any = [{"role": "user", "content": "Who repaired the boat?"}]


def ask(client: Any) -> None:
    """Every tier is taken, and the answer names the one used."""
    for tier in TIERS:
        used = "flex" if tier == "flex" else "default"
        chat = client.chat.completions.create(
            model="small", messages=MESSAGES, max_tokens=2, service_tier=tier
        )
        assert chat.service_tier == used, (tier, chat)
        chunks = client.chat.completions.create(
            model="small", messages=MESSAGES, max_tokens=2, service_tier=tier, stream=True
        )
        assert {chunk.service_tier for chunk in chunks} == {used}, tier
        given: Any = {
            "model": "small",
            "input": "Who?",
            "max_output_tokens": 16,
            "service_tier": tier,
        }
        assert client.responses.create(**given).service_tier == used, tier
        events = client.responses.create(**given, stream=True)
        told = {event.response.service_tier for event in events if hasattr(event, "response")}
        assert told == {used}, (tier, told)


def run_batch(client: Any) -> None:
    """A batch from upload to results."""
    lines = [
        {
            "custom_id": f"line-{n}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "small", "messages": MESSAGES, "max_tokens": 3},
        }
        for n in range(5)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    uploaded = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    end_s = time.monotonic() + 60
    while batch.status not in ("completed", "failed"):
        assert time.monotonic() < end_s, batch
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    assert batch.request_counts.completed == 5, batch
    records = client.files.content(batch.output_file_id).text.splitlines()
    assert {json.loads(record)["custom_id"] for record in records} == {
        f"line-{n}" for n in range(5)
    }
    assert batch.id in [listed.id for listed in client.batches.list()]
    client.files.delete(uploaded.id)


def answer_in_the_background(client: Any) -> None:
    """A response that is polled, then streamed from its middle, then deleted."""
    response = client.responses.create(
        model="small", input="Who?", max_output_tokens=16, background=True, service_tier="flex"
    )
    end_s = time.monotonic() + 60
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < end_s, response
        time.sleep(0.2)
        response = client.responses.retrieve(response.id)
    assert (response.error, response.background) == (None, True)
    events = client.responses.retrieve(response.id, stream=True, starting_after=3)
    *_, last = events
    assert last.response.output_text == response.output_text
    client.responses.delete(response.id)
    chat = client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": "Who?"}],
        max_tokens=8,
        service_tier="flex",
        extra_body={"background": True},
    )
    while chat.status in ("queued", "in_progress"):
        assert time.monotonic() < end_s, chat
        time.sleep(0.2)
        chat = client.chat.completions.retrieve(chat.id)
    assert (chat.status, chat.usage.completion_tokens) == ("completed", 8), chat
    client.chat.completions.delete(chat.id)


def main(_name: str, base_url: str, api_key: str, *_: str) -> None:
    """Run all of it."""
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60) as client:
        ask(client)
        run_batch(client)
        answer_in_the_background(client)


if __name__ == "__main__":
    main(*sys.argv[1:])
