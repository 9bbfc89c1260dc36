"""Why a request of a real server was late, by each id that its user may have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from client.coserve_process import coserve
from srt.batch_server.deployment import ADMIN_KEY, API_KEY
from srt.monitoring.watched import LINE_TOKENS, Watched

WORDS = [{"role": "user", "content": "Who rows the boat?"}]


def explained(watched: Watched, request_id: str) -> list[dict[str, Any]]:
    """The explanations of the requests with this id."""
    answer = watched.get(f"/coserve/steps/{request_id}", ADMIN_KEY).raise_for_status().json()
    assert answer["id"] == request_id
    requests: list[dict[str, Any]] = answer["requests"]
    return requests


def test_the_id_that_a_client_sent_explains_what_it_measured(watched: Watched) -> None:
    (sent,) = explained(watched, "trip/1")
    (same,) = explained(watched, sent["rid"])
    assert same == sent
    assert (sent["class"], sent["is_whole"], sent["is_ended"]) == ("online", True, True)
    first, measured = sent["first_token"], watched.traced
    assert first["seconds"] == pytest.approx(sum(first["parts"].values()))
    assert first["parts"]["own_s"] > 0
    # The way to the scheduler is known, and takes some time.
    assert 0 < first["parts"]["prepared_s"] < first["seconds"]
    assert 0 < first["seconds"] <= measured.ttft_s
    assert sent["gaps"]["tokens"] == 1 + len(measured.gaps_s)
    assert sent["verdict"].startswith("TTFT ")
    assert first["computed_tokens"] + first["cached_tokens"] == sent["prompt_tokens"]


def test_the_time_for_which_a_grammar_is_compiled_is_told_apart(watched: Watched) -> None:
    with watched.deployment.client() as client:
        schema = {"name": "boat", "schema": {"enum": ["a boat", "a raft"]}}
        first, again = (
            client.chat.completions.create(
                model="small",
                messages=WORDS,
                max_tokens=4,
                response_format={"type": "json_schema", "json_schema": schema},
            )
            for _ in range(2)
        )
    compiled_s, known_s = (
        explained(watched, answer.id)[0]["first_token"]["parts"]["grammar_s"]
        for answer in (first, again)
    )
    assert 0 < known_s < compiled_s


def test_the_id_of_an_answer_and_of_each_choice(watched: Watched) -> None:
    with watched.deployment.client() as client:
        arguments: dict[str, Any] = {"model": "small", "messages": WORDS, "max_tokens": 4}
        headers = {"x-request-id": "several"}
        answer = client.chat.completions.create(**arguments, n=2, extra_headers=headers)
        streamed = client.chat.completions.create(**arguments, stream=True)
        (streamed_id,) = {chunk.id for chunk in streamed}
        response = client.responses.create(model="small", input="Who rows?", max_output_tokens=4)
    assert [one["rid"] for one in explained(watched, answer.id)] == [answer.id]
    assert [one["rid"] for one in explained(watched, streamed_id)] == [streamed_id]
    assert [one["rid"] for one in explained(watched, response.id)] == [response.id]
    choices = explained(watched, "several")
    assert answer.id in [one["rid"] for one in choices]
    assert sum(one["gaps"]["tokens"] > 1 for one in choices) == 2
    # SGLang computes the prompt before it sends the choices: that is no time of its HTTP process.
    waits = [one["first_token"]["parts"] for one in choices if one["gaps"]["tokens"] > 1]
    assert [parts["prepared_s"] for parts in waits] == [0, 0]


def test_the_id_of_a_line_of_a_batch(watched: Watched) -> None:
    with watched.deployment.client() as client:
        text = client.files.content(watched.batch["output_file_id"]).text
    record = json.loads(text.splitlines()[-1])["response"]
    (line,) = explained(watched, record["request_id"])
    assert (line["class"], line["batch"]) == ("offline", watched.batch_id)
    assert line["gaps"]["tokens"] == LINE_TOKENS
    assert record["body"]["id"] == record["request_id"]


def test_the_longest_of_the_last_steps(watched: Watched) -> None:
    watched.get("/health_generate")
    (replica,) = watched.get("/coserve/steps?seconds=60&limit=3", ADMIN_KEY).json()["replicas"]
    steps = replica["steps"]
    assert 1 <= len(steps) <= 3
    assert all(" step of " in step["text"] for step in steps)
    assert [step["ended_s"] for step in steps] == sorted(step["ended_s"] for step in steps)
    for query in ("seconds=0", "seconds=61", "limit=0", "limit=100000"):
        assert watched.get(f"/coserve/steps?{query}", ADMIN_KEY).status_code == 400


def test_an_unknown_id_is_told_in_openais_form(watched: Watched) -> None:
    answer = watched.get("/coserve/steps/nobody", ADMIN_KEY)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "request_not_found"
    assert "x-request-id" in error["message"]
    assert "8,192 steps" in error["message"]


def test_it_is_the_operators_alone(watched: Watched) -> None:
    for path in ("/coserve/steps", "/coserve/steps/trip/1"):
        for key in (API_KEY, None, "another"):
            assert watched.get(path, key).status_code == 401


def test_the_command_tells_it_in_text(watched: Watched) -> None:
    flags = ("--base-url", watched.base_url, "--api-key")
    code, shown, errors = coserve("why", "trip/1", *flags, ADMIN_KEY)
    assert (code, errors) == (0, "")
    (sent,) = explained(watched, "trip/1")
    assert sent["verdict"] in shown
    assert "first token of " in shown
    code, shown, errors = coserve("why", "trip/1", "--json", *flags, ADMIN_KEY)
    assert (code, errors) == (0, "")
    assert json.loads(shown)["requests"] == [sent]
    code, _, errors = coserve("why", "nobody", *flags, ADMIN_KEY)
    assert (code, errors.startswith("coserve: HTTP 404: no kept step had a request")) == (2, True)
    code, _, errors = coserve("why", "trip/1", *flags, API_KEY)
    assert code == 3
    assert "--admin-api-key" in errors
