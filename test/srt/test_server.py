"""The real server over HTTP: every door, with the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from sglang_coserve.local_server import LocalServer
from waiting import eventually


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "server.log"


@pytest.fixture(scope="module")
def server(small_model: Path, log_path: Path) -> Iterator[LocalServer]:
    flags = ["--model-path", str(small_model), "--dtype", "float32", "--slo-ttft-ms", "400"]
    # Since 0.5.22 SGLang answers requests for a response only if they name its model.
    flags += ["--served-model-name", "m", "--startup-profile-seconds", "0"]
    slos = ["--slo", "ttft p99 <= 300ms", "tpot mean <= 1s"]
    with pytest.MonkeyPatch.context() as patch:
        # SGLang's own look whether a client is still there comes too late for any test.
        patch.setenv("SGLANG_REQUEST_STATE_WAIT_TIMEOUT", "3600")
        with LocalServer([*flags, *slos], log_path=log_path) as running:
            yield running


@pytest.fixture
def client(server: LocalServer) -> Iterator[openai.OpenAI]:
    url = f"{server.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def http(server: LocalServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.base_url, timeout=60) as client:
        yield client


def status(http: httpx2.Client) -> dict[str, Any]:
    (replica,) = http.get("/coserve/status").raise_for_status().json()["replicas"]
    return dict(replica)


def num_offline_received(http: httpx2.Client) -> int:
    return int(status(http)["offline"]["received"])


MESSAGES: Any = [{"role": "user", "content": "Who repaired the boat?"}]
TEXT = "Who repaired the boat?"

GREEDY = {"num_predict": 2, "temperature": 0}
DOORS: dict[str, dict[str, Any]] = {
    "/generate": {"text": TEXT, "sampling_params": {"max_new_tokens": 2}},
    "/v1/completions": {"model": "m", "prompt": TEXT, "max_tokens": 2, "n": 2},
    "/v1/chat/completions": {"model": "m", "messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"model": "m", "input": TEXT, "max_output_tokens": 2},
    "/v1/messages": {"model": "m", "messages": MESSAGES, "max_tokens": 2},
    "/api/chat": {"model": "m", "messages": MESSAGES, "options": GREEDY},
    "/api/generate": {"model": "m", "prompt": TEXT, "options": GREEDY},
    "/v1/score": {"model": "m", "query": TEXT, "items": ["Anna", "Boris"], "label_token_ids": [7]},
    "/vertex_generate": {
        "instances": [{"text": TEXT}],
        "parameters": {"sampling_params": {"max_new_tokens": 2}},
    },
}
"""A body for each route that generates or scores."""

if version("sglang") != "0.5.17":
    ASKED = {"type": "score", "instructions": "Is it broken?", "criteria": ["no", "yes"]}
    DOORS["/v1/systemone"] = {"model": "m", "state": TEXT, "questions": {"q": ASKED}}
    QUESTION = {"id": "q", "type": "score", "question": "Is it broken?", "levels": ["no", "yes"]}
    DOORS["/v1/decisions"] = {"model": "m", "input": TEXT, "questions": [QUESTION]}
NOT_STREAMED = {"/v1/score", "/v1/systemone", "/v1/decisions", "/vertex_generate"}


def test_status_shows_settings_and_classes(http: httpx2.Client) -> None:
    replica = status(http)
    assert replica["config"]["slo_ttft_ms"] == 400
    assert replica["config"]["slo"] == ["ttft p99 <= 300ms", "tpot mean <= 1s"]
    assert replica["config"]["offline_policy"] == "coserve"
    assert replica["config"]["kv_checkpoint"] == replica["kv_checkpoint"]["mode"] == "off"
    delays = {"delay_s", "delay_ttft_s", "delay_gaps_s", "billed"}
    assert replica["online"].keys() == {"waiting", "running", "shed", *delays}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", DOORS)
def test_a_mark_holds_on_every_route(http: httpx2.Client, path: str, streams: bool) -> None:
    before = num_offline_received(http)
    body = (
        DOORS[path]
        | {"service_tier": "flex"}
        | ({"stream": streams} if path not in NOT_STREAMED else {})
    )
    response = http.post(path, json=body).raise_for_status()
    assert response.headers["x-coserve-class"] == "offline"
    # A prompt, and for some each choice or item, is a request of its own.
    assert num_offline_received(http) > before
    before = num_offline_received(http)
    assert "x-coserve-class" not in http.post(path, json=DOORS[path]).raise_for_status().headers
    assert num_offline_received(http) == before


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FORGED = {"coserve_class": "offline", "_coserve_generated": [5, 6]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES, "logprobs": True}),
        (CHAT, {"messages": MESSAGES, "stream": True}),
        (COMPLETIONS, {"prompt": ["x", "y"]}),
        (COMPLETIONS, {"prompt": "x", "stream": True}),
        ("/generate", {"text": "x"}),
        ("/generate", {"text": ["x", "y"]}),
        ("/generate", {"input_ids": [[5], [6]]}),
        ("/generate", {"text": "x", "sampling_params": {"n": 2}}),
        ("/generate", {"text": "x", "stream": True}),
    ],
)
@pytest.mark.parametrize(
    ("marks", "says"),
    [
        ({"coserve_slo_tpot_ms": 10**30}, "0.001 to 1e+09"),
        ({"coserve_slo_ttft": 250}, "co-serving knows coserve_class, coserve_slo_ttft_ms"),
        ({"coserve_class": "offline", "coserve_slo_ttft_ms": 250}, "completion window"),
        ({"coserve_class": "batch"}, "'online' or 'offline'"),
        ({"service_tier": "flex", "custom_params": FORGED}, "set by the server only"),
    ],
)
def test_bad_marks_are_a_400_at_every_door(
    http: httpx2.Client, path: str, body: dict[str, Any], marks: dict[str, Any], says: str
) -> None:
    before = num_offline_received(http)
    if path == "/generate":
        params = body.get("sampling_params", {})
        asked = {"sampling_params": {**params, "custom_params": marks.get("custom_params", marks)}}
    else:
        asked = {"model": "default", **marks}
    response = http.post(path, json={**body, **asked})
    # SGLang's /generate puts the error of a stream, of whatever parameter, into its first event.
    # The class is known before.
    in_event = path == "/generate" and "stream" in body and marks != {"coserve_class": "batch"}
    assert response.status_code == (200 if in_event else 400)
    assert says in response.text
    assert num_offline_received(http) == before


@pytest.mark.parametrize("path", [path for path in DOORS if "model" in DOORS[path]])
def test_another_model_is_not_found_on_any_route(http: httpx2.Client, path: str) -> None:
    answer = http.post(path, json=DOORS[path] | {"model": "gpt-4o"})
    assert answer.status_code == 404
    assert "the model 'gpt-4o' is not served here: use 'm'" in answer.text


NULLS = {
    "/v1/completions": ("echo", "logprobs", "n", "stop", "stream", "suffix", "top_p", "user"),
    "/v1/chat/completions": ("logprobs", "n", "stream", "tools", "tool_choice", "stop", "user"),
    "/v1/responses": ("tools", "tool_choice", "service_tier", "stream", "top_p", "metadata"),
    "/v1/messages": ("stream", "tools", "tool_choice", "top_p", "system", "metadata"),
    "/generate": ("stream", "return_logprob", "rid"),
}


@pytest.mark.parametrize("path", NULLS)
def test_nulls_and_halves_of_pairs_are_served(http: httpx2.Client, path: str) -> None:
    text = json.dumps(DOORS[path] | dict.fromkeys(NULLS[path])).replace("boat", "boat \\ud83d")
    assert "ud83d" in text
    answer = http.post(path, content=text, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text


def offline_body(max_new_tokens: int) -> dict[str, Any]:
    params = {
        "max_new_tokens": max_new_tokens,
        "ignore_eos": True,
        "custom_params": {"coserve_class": "offline"},
    }
    return {"input_ids": list(range(10, 300)), "sampling_params": params}


def test_a_saturating_offline_load_can_be_checked_used_beside_and_dropped(
    server: LocalServer, http: httpx2.Client, client: openai.OpenAI
) -> None:
    """Health checks and online requests get through; leaving aborts what waits and runs."""

    async def run() -> None:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(
            base_url=server.base_url, timeout=None, limits=limits
        ) as many:
            body = offline_body(max_new_tokens=700)
            posts = [asyncio.create_task(many.post("/generate", json=body)) for _ in range(200)]
            await asyncio.to_thread(eventually, lambda: num_offline_received(http) - before == 200)
            health = await asyncio.to_thread(http.get, "/health_generate")
            assert health.status_code == 200
            answer = await asyncio.to_thread(
                client.completions.create, model="default", prompt="x", max_tokens=4
            )
            assert answer.choices[0].text
            offline = (await asyncio.to_thread(status, http))["offline"]
            assert offline["waiting"] + offline["running"] > 100
            assert not any(post.done() for post in posts)
            for post in posts:
                post.cancel()
            await asyncio.gather(*posts, return_exceptions=True)

    before = num_offline_received(http)
    asyncio.run(run())

    def is_empty() -> bool:
        offline = status(http)["offline"]
        return not (offline["waiting"] or offline["running"] or offline["prefilling"])

    eventually(is_empty)
    # The last step may be under way when nothing is left in it: SGLang waits for it.
    flushed = http.post("/flush_cache", params={"timeout": 30}, timeout=60)
    assert flushed.status_code == 200


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
async def test_a_client_that_leaves_frees_the_engine(server: LocalServer, path: str) -> None:
    """Also one that does not stream. One that does, of the same length, says how time goes by."""
    long = {"max_new_tokens": 900, "ignore_eos": True}
    clock = {"text": TEXT, "sampling_params": long, "stream": True}
    left: dict[str, Any] = {
        "/generate": {"text": TEXT, "sampling_params": long},
        "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 900, "ignore_eos": True},
    }
    async with httpx2.AsyncClient(base_url=server.base_url, timeout=60) as http:

        async def num_running() -> int:
            (replica,) = (await http.get("/coserve/status")).json()["replicas"]
            return int(replica["online"]["running"])

        async def tick() -> None:
            async with http.stream("POST", "/generate", json=clock) as streamed:
                async for line in streamed.aiter_lines():
                    if line.startswith("data: {"):
                        done = json.loads(line.removeprefix("data: "))["meta_info"]
                        tokens.append(done["completion_tokens"])

        tokens: list[int] = []
        leaving = asyncio.create_task(http.post(path, json=left[path] | {"model": "m"}))
        ticking = asyncio.create_task(tick())
        try:
            while await num_running() < 2:
                assert not leaving.done() and not ticking.done()
            leaving.cancel()
            left_at = len(tokens)
            while await num_running() == 2:
                assert len(tokens) < left_at + 300, "it goes on without its client"
        finally:
            leaving.cancel()
            ticking.cancel()
            await asyncio.wait({leaving, ticking})
