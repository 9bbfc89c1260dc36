"""What users' programs do with clients for offline work: ten requests each; run by path."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

COUNT, GIVE_UP_S = 10, 90
QUESTIONS = [f"Who repaired boat {number}?" for number in range(COUNT)]


def autobatcher(base_url: str, api_key: str, _directory: Path) -> None:
    """Chats and responses, which it sends to the background and polls."""
    asyncio.run(_autobatcher(base_url, api_key))


async def _autobatcher(base_url: str, api_key: str) -> None:
    from autobatcher import BatchOpenAI

    client = BatchOpenAI(base_url=base_url, api_key=api_key, poll_interval_seconds=0.2)
    chats = await asyncio.gather(
        *(
            client.chat.completions.create(
                model="small", messages=[{"role": "user", "content": text}], max_tokens=12
            )
            for text in QUESTIONS
        )
    )
    assert [chat.object for chat in chats] == ["chat.completion"] * COUNT
    assert {chat.usage.completion_tokens for chat in chats} <= set(range(1, 13))
    responses = await asyncio.gather(
        *(
            client.responses.create(model="small", input=text, max_output_tokens=12)
            for text in QUESTIONS
        )
    )
    assert {each.status for each in responses} <= {"completed", "incomplete"}
    assert {each.service_tier for each in responses} == {"flex"}
    await client.close()


def instructor(base_url: str, api_key: str, directory: Path) -> None:
    """A batch whose answers are objects."""
    from instructor.batch import BatchProcessor
    from pydantic import BaseModel

    class Answer(BaseModel):
        is_repaired: bool

    os.environ |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
    processor = BatchProcessor("openai/small", Answer)
    messages: list[list[dict[str, Any]]] = [[{"role": "user", "content": t}] for t in QUESTIONS]
    file = processor.create_batch_from_messages(
        messages, str(directory / "in.jsonl"), max_tokens=300, temperature=1.0
    )
    batch_id = processor.submit_batch(file)
    _wait(lambda: processor.get_batch_status(batch_id)["status"])
    results = processor.retrieve_results(batch_id)
    assert {one.custom_id for one in results} == {f"request-{n}" for n in range(COUNT)}
    assert all(one.success for one in results), results
    assert {type(one.result.is_repaired) for one in results} == {bool}
    # Of the newest only: it reads no batch without metadata, which those of others have not.
    assert batch_id in [listed.id for listed in processor.list_batches(1)]


def langchain_openai(base_url: str, api_key: str, _directory: Path) -> None:
    """Flex requests, as a whole and as streams."""
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="small",
        base_url=base_url,
        api_key=api_key,
        service_tier="flex",
        max_tokens=12,
        temperature=0.0,
        timeout=GIVE_UP_S,
    )
    answers = model.batch(QUESTIONS)
    assert [one.response_metadata["service_tier"] for one in answers] == ["flex"] * COUNT
    streamed = [chunk.text for chunk in model.stream(QUESTIONS[0])]
    assert "".join(streamed) == answers[0].text


def _wait(status: Any) -> None:
    end_s = time.monotonic() + GIVE_UP_S
    while (seen := status()) != "completed":
        assert time.monotonic() < end_s and seen not in ("failed", "expired"), seen
        time.sleep(0.2)


def main(name: str, base_url: str, api_key: str, _without: str, directory: str) -> None:
    """Run what a client has here; its name is that of its package."""
    globals()[name.replace("-", "_")](base_url, api_key, Path(directory))


if __name__ == "__main__":
    main(*sys.argv[1:])
