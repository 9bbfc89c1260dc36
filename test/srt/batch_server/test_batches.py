"""Batches on the real server, with OpenAI's client: every state, every door."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest

from batch.route_calls import records, texts, until
from batch.scenarios import SECRET
from srt.batch_server.deployment import Deployment, create, line, lines
from waiting import eventually
from web_server import WebServer


def test_a_batch_completes_as_the_routes_would_answer(client: openai.OpenAI) -> None:
    content = lines(5) + line("bad", max_tokens=-1).encode()
    batch = until(client, create(client, content).id, "completed")
    assert batch.request_counts is not None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (6, 5, 1)
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
        assert texts(served)[f"id-{n}"] == alone.choices[0].text
    bad = records(client, batch.error_file_id)["bad"]
    assert bad["response"]["status_code"] == 400
    assert "max_" in bad["response"]["body"]["error"]["message"]


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


def test_a_webhook_tells_the_end(
    deployment: Deployment, client: openai.OpenAI, webhook_receiver: WebServer
) -> None:
    batch = create(client, lines(1))

    def told() -> list[tuple[str, str]]:
        events = [
            client.webhooks.unwrap(call.content, dict(call.headers), secret=SECRET)
            for call in webhook_receiver.calls
            if json.loads(call.content)["data"]["id"] == batch.id
        ]
        return [(event.type, event.data.id) for event in events]

    assert eventually(told) == [("batch.completed", batch.id)]
    assert client.batches.retrieve(batch.id).status == "completed"
    eventually(lambda: deployment.status()["batch_api"]["webhooks_pending"] == 0)


def test_a_background_response_needs_no_tier_to_have_a_deadline(client: openai.OpenAI) -> None:
    begun = client.responses.create(
        model="small",
        input="The old mill",
        max_output_tokens=4,
        background=True,
        extra_body={"coserve_deadline_s": 600},
    )
    ends = ("completed", "incomplete", "failed")
    eventually(lambda: client.responses.retrieve(begun.id).status in ends)
    assert client.responses.retrieve(begun.id).error is None


def test_a_background_response_that_sglang_refuses_has_failed(client: openai.OpenAI) -> None:
    begun = client.responses.create(
        model="small", input="The old mill", background=True, service_tier="flex", top_p=7.0
    )
    assert begun.status == "queued"
    eventually(lambda: client.responses.retrieve(begun.id).status == "failed")
    error = client.responses.retrieve(begun.id).error
    assert "top_p" in error.message


def test_a_data_directory_in_use_stops_the_start_of_another_server(
    deployment: Deployment, small_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sglang_coserve.srt.launch import main

    assert deployment.status(), "otherwise it would serve for ever"
    flags = ["--model-path", str(small_model), "--coserve-data-dir", str(deployment.data)]
    assert main(flags) == 2
    said = capsys.readouterr().err.splitlines()
    (error,) = [line for line in said if line.startswith("error: ")]
    assert "in use by another server" in error
