"""Background responses on a real server: through kill -9, by OpenAI's client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.responses import Response

from srt.batch_server.deployment import Deployment
from waiting import eventually

INPUTS = [f"The old mill {number}" for number in range(4)]
"""Several, so that none has ended before some of its tokens are in a journal."""


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


def lines_in_flight(deployment: Deployment) -> int:
    return int(deployment.status()["batch_api"]["lines_in_flight"])


# A killed server's lines go on in test_interruptions, and responses after a restart in test/batch.
@pytest.mark.heavy
def test_a_killed_servers_responses_are_completed(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    deployment.plan_with("coserve")
    alone = [asked(client, text) for text in INPUTS]
    begun = [begin(client, text, metadata={"of": text}) for text in INPUTS]
    journals = [deployment.data / "journal" / each.id.replace("resp_", "batch_") for each in begun]
    eventually(lambda: all(path.exists() for path in journals))
    deployment.kill()
    assert all(path.exists() for path in journals), "they had ended before"
    deployment.start("coserve")
    for response, text, expected in zip(begun, INPUTS, alone, strict=True):
        done = ended(client, response.id)
        assert (done.status, done.output_text) == (expected.status, expected.output_text)
        assert (done.id, done.metadata, done.background) == (response.id, {"of": text}, True)
        assert done.usage is not None
        assert expected.usage is not None
        assert done.usage.output_tokens == expected.usage.output_tokens
        with client.responses.retrieve(response.id, stream=True, starting_after=2) as events:
            rest = list(events)
        assert rest[0].sequence_number == 3
        deltas = [event.delta for event in rest if event.type == "response.output_text.delta"]
        assert deltas == [done.output_text]
        client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)


def test_a_cancelled_response_leaves_the_engine(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    response = begin(client, "The old mill", 900)
    eventually(lambda: client.responses.retrieve(response.id).status == "in_progress")
    assert client.responses.cancel(response.id).status == "cancelled"
    eventually(lambda: lines_in_flight(deployment) == 0)
    eventually(lambda: not deployment.status()["batch_api"]["batches"])
    assert client.responses.retrieve(response.id).status == "cancelled"


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
