"""Background responses on a real server: through kill -9, by OpenAI's client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.responses import Response

from srt.batch_server.deployment import Deployment
from waiting import eventually

NUM_TOKENS = 400


def begin(client: openai.OpenAI, max_output_tokens: int, **fields: Any) -> Response:
    response: Response = client.responses.create(
        model="small",
        input="The old mill",
        background=True,
        service_tier="flex",
        temperature=0,
        max_output_tokens=max_output_tokens,
        **fields,
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


def test_a_killed_servers_response_is_completed(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    deployment.plan_with("coserve")
    alone = client.responses.create(
        model="small",
        input="The old mill",
        temperature=0,
        max_output_tokens=NUM_TOKENS,
    )
    response = begin(client, NUM_TOKENS, metadata={"run": "7"})
    journal = deployment.data / "journal" / response.id.replace("resp_", "batch_")
    eventually(journal.exists)
    assert client.responses.retrieve(response.id).status == "in_progress"
    deployment.kill()
    deployment.start("coserve")
    done = ended(client, response.id)
    assert done.status == alone.status
    assert done.output_text == alone.output_text
    assert (done.id, done.metadata, done.background) == (response.id, {"run": "7"}, True)
    assert done.usage is not None
    assert alone.usage is not None
    assert done.usage.output_tokens == alone.usage.output_tokens
    with client.responses.retrieve(response.id, stream=True, starting_after=2) as events:
        rest = list(events)
    assert rest[0].sequence_number == 3
    assert [e.delta for e in rest if e.type == "response.output_text.delta"] == [done.output_text]
    with (
        deployment.client("another key") as other,
        pytest.raises((openai.NotFoundError, openai.AuthenticationError)),
    ):
        other.responses.retrieve(response.id)
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_cancelled_response_leaves_the_engine(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    response = begin(client, 3000)
    eventually(lambda: lines_in_flight(deployment) == 1)
    assert client.responses.cancel(response.id).status == "cancelled"
    eventually(lambda: lines_in_flight(deployment) == 0)
    eventually(lambda: not deployment.status()["batch_api"]["batches"])
    assert client.responses.retrieve(response.id).status == "cancelled"


def test_what_sglang_refuses_has_failed_and_others_are_its_own(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    refused = ended(client, begin(client, 8, top_p=7.0).id)
    assert refused.status == "failed"
    assert refused.error is not None
    assert "top_p" in refused.error.message
    online = client.responses.create(model="small", input="The old mill", max_output_tokens=8)
    assert online.output_text
    with client.responses.create(
        model="small", input="The old mill", max_output_tokens=8, stream=True
    ) as events:
        *_, last = events
    assert last.type in ("response.completed", "response.incomplete")
