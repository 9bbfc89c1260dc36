"""Requests for a model that is not served are refused, on every route that names one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI, Form, Request, UploadFile
from fastapi.testclient import TestClient

from sglang_coserve.guard.bodies import RequestGateMiddleware
from sglang_coserve.srt import compat
from sglang_coserve.srt.batch_backend.loaded_model import model_names
from sglang_coserve.srt.marks.wanted_model import (
    MODEL_PATHS,
    WantedModelMiddleware,
    check_models_of_forms,
)


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()

    def names() -> tuple[str, ...]:
        return "small", "poet"

    @app.post("/v1/audio/transcriptions")
    async def transcribe(file: UploadFile, model: str = Form(default="default")) -> str:
        return model

    check_models_of_forms(app, names)

    @app.post("/{path:path}")
    async def echo(request: Request) -> Any:
        return await request.json()

    app.add_middleware(WantedModelMiddleware, names=names)
    app.add_middleware(RequestGateMiddleware)
    return TestClient(app)


def post(client: TestClient, path: str, body: Any) -> tuple[int, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body)
    answer = client.post(path, content=content, headers={"content-type": "application/json"})
    return answer.status_code, answer.json()


@pytest.mark.parametrize("path", sorted(MODEL_PATHS))
@pytest.mark.parametrize("stream", [False, True])
def test_another_model_is_refused(client: TestClient, path: str, stream: bool) -> None:
    status, body = post(client, path, {"model": "gpt-4o", "stream": stream, "prompt": "x"})
    assert status == 404
    said = "the model 'gpt-4o' is not served here: use 'small', 'poet', or leave model out"
    assert said in str(body)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/chat/completions", {"type": "invalid_request_error", "code": "model_not_found"}),
        ("/v1/messages", {"type": "not_found_error"}),
    ],
)
def test_the_refusal_is_of_the_routes_protocol(
    client: TestClient, path: str, told: Mapping[str, str]
) -> None:
    _, body = post(client, path, {"model": "gpt-4o"})
    assert told.items() <= body["error"].items()
    _, body = post(client, "/api/chat", {"model": "gpt-4o"})
    assert isinstance(body["error"], str)


@pytest.mark.parametrize("model", ["small", "default", "", None, 7, ["small"], "small:poet"])
def test_what_is_served_passes_as_it_is(client: TestClient, model: object) -> None:
    body = {"model": model, "prompt": "x"}
    assert post(client, "/v1/completions", body) == (200, body)


def test_who_names_none_gets_what_there_is(client: TestClient) -> None:
    for body in ({"prompt": "x"}, [], "text"):
        assert post(client, "/v1/completions", body) == (200, body)


def test_the_name_of_an_adapter_reaches_it_and_all_else_stays_as_it_is(client: TestClient) -> None:
    body = {"model": "poet", "prompt": ["\u2028", 1e10], "seed": 1 << 80}
    served = {**body, "model": "small:poet"}
    assert post(client, "/v1/completions", body) == (200, served)


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": {"model": "small"}, "model": "gpt-4o"}',
        b'{"model": "small", "model": "gpt-4o"}',
        b'{"model": "gpt\\u002d4o"}',
        b'{"prompt": "cut \\ud83d", "model": "gpt-4o"}',
        b'{"model": "gpt-4o \\ud83d"}',
    ],
)
def test_it_is_the_model_that_the_route_would_read(client: TestClient, content: bytes) -> None:
    assert post(client, "/v1/completions", content)[0] == 404


def test_a_form_names_a_model_too(client: TestClient) -> None:
    def transcribed(**fields: str) -> httpx2.Response:
        file = {"file": ("a.wav", b"sound")}
        return client.post("/v1/audio/transcriptions", data=fields, files=file)

    assert transcribed(model="small").json() == "small"
    assert transcribed().json() == "default"
    refused = transcribed(model="whisper-1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_ollamas_tag_is_no_part_of_the_name(client: TestClient) -> None:
    assert post(client, "/api/chat", {"model": "small:latest"})[0] == 200
    assert post(client, "/v1/completions", {"model": "small:latest"})[0] == 404


def test_half_a_surrogate_pair_is_served_as_a_character(client: TestClient) -> None:
    body = {"model": "small", "prompt": ["cut \ud83d", "whole \U0001f600"]}
    served = {"model": "small", "prompt": ["cut \ufffd", "whole \U0001f600"]}
    for path in ("/v1/completions", "/generate"):
        assert post(client, path, body) == (200, served)


@pytest.mark.parametrize(("most", "names"), [(None, ("m", "clerk")), (2, ("m", "poet", "clerk"))])
def test_an_adapter_that_made_room_for_another_can_be_asked_for(
    most: int | None, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang loads it again, where it has unloaded the adapter by itself."""
    settings = SimpleNamespace(max_loaded_loras=most)
    monkeypatch.setattr(compat, "settings_of", lambda _args: settings)
    registry = SimpleNamespace(get_all_adapters=lambda: {"clerk": object()})
    known = {"poet": object(), "clerk": object()}
    manager = SimpleNamespace(server_args=None, lora_registry=registry, lora_ref_cache=known)
    manager.served_model_name = "m"
    assert model_names(manager) == names
