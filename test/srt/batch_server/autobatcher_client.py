"""What a user's program does with ``autobatcher``: chats and responses that it sends to the
background and polls; run by path."""

from __future__ import annotations

import asyncio
import sys
from importlib.metadata import version

from autobatcher import BatchOpenAI

COUNT = 10


async def main(base_url: str, api_key: str) -> None:
    """Run all of it and print the client's version."""
    client = BatchOpenAI(base_url=base_url, api_key=api_key, poll_interval_seconds=0.2)
    asked = [f"Who repaired boat {number}?" for number in range(COUNT)]
    chats = await asyncio.gather(
        *(
            client.chat.completions.create(
                model="small", messages=[{"role": "user", "content": text}], max_tokens=12
            )
            for text in asked
        )
    )
    assert [chat.object for chat in chats] == ["chat.completion"] * COUNT
    assert {chat.usage.completion_tokens for chat in chats} <= set(range(1, 13))
    responses = await asyncio.gather(
        *(
            client.responses.create(model="small", input=text, max_output_tokens=12)
            for text in asked
        )
    )
    assert {each.status for each in responses} <= {"completed", "incomplete"}
    assert {each.service_tier for each in responses} == {"flex"}
    await client.close()
    print(version("autobatcher"))  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
