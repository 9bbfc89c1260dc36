"""Batches on the real server, with OpenAI's client: every state, every door."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from srt.batch_server.deployment import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    RESPONSES,
    WEBHOOK_SECRET,
    Deployment,
    completed,
    create,
    extra_of,
    line,
    lines,
    records,
    text_of,
    until,
)
from srt.batch_server.webhook_receiver import WebhookReceiver
from waiting import eventually


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


def test_chat_and_responses_are_the_same_conversation(client: openai.OpenAI) -> None:
    chat = create(client, lines(2, 10, CHAT), endpoint=CHAT)
    # SGLang leaves two tokens of a response's limit free.
    responses = create(client, lines(2, 12, RESPONSES), endpoint=RESPONSES)
    chats, answers = completed(client, chat.id), completed(client, responses.id)
    for custom_id in ("id-0", "id-1"):
        assert text_of(answers[custom_id]) == text_of(chats[custom_id]) != ""
        assert answers[custom_id]["response"]["body"]["object"] == "response"
    usage = client.batches.retrieve(responses.id).usage
    assert usage is not None
    assert usage.output_tokens == 2 * 10
    assert usage.input_tokens > 0


def test_an_endpoint_of_another_kind_of_model_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, b"x", endpoint=EMBEDDINGS)
    assert (caught.value.code, caught.value.param) == ("invalid_endpoint", "endpoint")
    assert COMPLETIONS in str(caught.value)


def test_cancelling_leaves_the_engine_idle(deployment: Deployment, client: openai.OpenAI) -> None:
    batch = create(client, lines(3) + lines(600, 400).replace(b"id-", b"long-"))
    until(client, batch.id, "in_progress", some_done=True)

    def is_busy() -> bool:
        status = deployment.status()["batch_api"]
        is_full = status["lines_in_flight"] == 512 and 0 < status["lines_waiting"] <= 603 - 512
        return is_full and status["batches"] == {"in_progress": 1}

    eventually(is_busy)
    client.batches.cancel(batch.id)
    batch = until(client, batch.id, "cancelled")
    assert records(client, batch.output_file_id)

    def is_idle() -> bool:
        status = deployment.status()
        offline, batches = status["replicas"][0]["offline"], status["batch_api"]
        return not any(
            (offline["running"], offline["waiting"], batches["batches"], batches["lines_in_flight"])
        )

    eventually(is_idle)


def test_a_window_expires(client: openai.OpenAI) -> None:
    begun = create(client, lines(400, 400), window="1s", best_effort=True)
    batch = until(client, begun.id, "expired")
    expired = records(client, batch.error_file_id)
    done = records(client, batch.output_file_id)
    assert len(expired) + len(done) == 400
    assert {record["error"]["code"] for record in expired.values()} == {"batch_expired"}


def test_the_object_says_when_it_will_be_complete(client: openai.OpenAI) -> None:
    for _ in range(19):  # The rate is known, and there is a history.
        completed(client, create(client, lines(2, 8)).id)
    small = create(client, lines(400, 200), window="24h")
    large = create(client, lines(20_000, 900), window="5m", best_effort=True)
    with pytest.raises(openai.BadRequestError, match="P95") as caught:
        create(client, lines(20_000, 900), window="1s")
    assert caught.value.code == "window_too_short"
    for batch in (small, large):
        assert extra_of(batch)["eta"] <= extra_of(batch)["eta_p95"]
        until(client, batch.id, "in_progress")
    now = client.batches.retrieve(large.id)
    assert now.expires_at is not None
    assert extra_of(now)["eta"] > now.expires_at
    assert "after the window of 5m closes" in extra_of(now)["warning"]
    assert extra_of(now)["rate_tokens_per_s"] > 0
    now = client.batches.retrieve(small.id)
    assert now.expires_at is not None
    assert now.created_at <= extra_of(now)["eta"] < now.expires_at
    assert extra_of(now)["warning"] is None
    for batch in (small, large):
        client.batches.cancel(batch.id)
        until(client, batch.id, "cancelled")


def test_a_webhook_tells_the_end(
    deployment: Deployment, client: openai.OpenAI, webhook_receiver: WebhookReceiver
) -> None:
    batch = create(client, lines(1))

    def told() -> list[tuple[str, str]]:
        events = [
            client.webhooks.unwrap(body, headers, secret=WEBHOOK_SECRET)
            for headers, body in webhook_receiver.posts
            if json.loads(body)["data"]["id"] == batch.id
        ]
        return [(event.type, event.data.id) for event in events]

    eventually(told)
    assert told() == [("batch.completed", batch.id)]
    assert client.batches.retrieve(batch.id).status == "completed"
    eventually(lambda: deployment.status()["batch_api"]["webhooks_pending"] == 0)


def test_keys_are_those_of_every_route(deployment: Deployment) -> None:
    for api_key in ("wrong", "secre"):
        with deployment.client(api_key) as client, pytest.raises(openai.AuthenticationError):
            client.batches.list()
    bare = httpx.post(f"{deployment.base_url}/v1/files", content=b"x" * 100)
    assert bare.status_code == 401


def test_a_deadline_of_a_single_request_is_kept_or_refused(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    policy = deployment.status()["replicas"][0]["config"]["offline_policy"]
    assert policy == "fifo"
    ask = {"model": "small", "prompt": "The old mill", "max_tokens": 2}
    with pytest.raises(openai.BadRequestError, match="this server keeps no coserve_deadline_s"):
        client.completions.create(
            **ask, extra_body={"service_tier": "flex", "coserve_deadline_s": 60}
        )
    with pytest.raises(openai.BadRequestError, match="is for offline requests"):
        client.completions.create(**ask, extra_body={"coserve_deadline_s": 60})
    # A gateway says how long it would let any request wait.
    told = {"x-llm-d-inference-ttl": "90s"}
    for extra in ({}, {"service_tier": "flex"}):
        assert client.completions.create(**ask, extra_body=extra, extra_headers=told).choices
