"""Background responses on a real server: through kill -9, by OpenAI's client."""

from __future__ import annotations

from typing import Any

import openai
from openai.types.responses import Response

from srt.batch_server.deployment import Deployment
from waiting import eventually


def asked(
    client: openai.OpenAI, text: str, max_output_tokens: int = 400, **fields: Any
) -> Response:
    response: Response = client.responses.create(
        model="small", input=text, temperature=0, max_output_tokens=max_output_tokens, **fields
    )
    return response


def begin(
    client: openai.OpenAI, text: str, max_output_tokens: int = 400, **fields: Any
) -> Response:
    response = asked(
        client, text, max_output_tokens, background=True, service_tier="flex", **fields
    )
    assert response.status == "queued"
    return response


def ended(client: openai.OpenAI, response_id: str) -> Response:
    """The response once it has ended."""

    def has_ended() -> bool:
        return client.responses.retrieve(response_id).status not in ("queued", "in_progress")

    eventually(has_ended)
    return client.responses.retrieve(response_id)


def test_what_sglang_refuses_has_failed_and_others_are_its_own(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    refused = ended(client, begin(client, "The old mill", 8, top_p=7.0).id)
    assert refused.status == "failed"
    assert refused.error is not None
    assert "top_p" in refused.error.message
    assert asked(client, "The old mill", 8).output_text
    with client.responses.create(
        model="small", input="The old mill", max_output_tokens=8, stream=True
    ) as events:
        *_, last = events
    assert last.type in ("response.completed", "response.incomplete")
