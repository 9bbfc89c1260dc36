"""Every route of SGLang's is decided on, and none tells a secret of the server's."""

from __future__ import annotations

import json
import secrets
from argparse import ArgumentParser
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx2
import pytest

from batch.route_calls import completed, create
from calls import call, client_of, get
from guard.test_output_parsers import SLOW
from sglang_coserve.guard.route_table import (
    DECISIONS,
    Caller,
    RouteGate,
    decide,
    decision_on,
    leaves,
)
from sglang_coserve.local_server import LocalServer
from sglang_coserve.srt.compat.versions import module_for
from sglang_coserve.srt.marks.marks_middleware import MARKED_PATHS
from sglang_coserve.srt.monitoring.told_settings import STARS, told
from sglang_coserve.web.asgi import known_paths

PROMPT = {"model": "m", "prompt": "The old mill", "max_tokens": 2}


# --- The table --------------------------------------------------------------------------


def test_every_route_of_the_installed_sglang_is_decided_on() -> None:
    from sglang.srt.entrypoints.http_server import app

    paths = {route.path for route in leaves(app.routes)}
    ours = {path for path in paths if path.startswith("/coserve") or "{batch_id}" in path}
    assert {path for path in paths - ours if decision_on(path) is None} == set()
    if module_for(version("sglang")) != "v17":
        assert paths >= MARKED_PATHS


def test_no_path_is_decided_on_twice() -> None:
    paths = [path for decision in DECISIONS for path in decision.paths]
    assert len(paths) == len(set(paths))


def test_a_route_that_is_new_is_not_served(caplog: pytest.LogCaptureFixture) -> None:
    from fastapi import APIRouter, FastAPI
    from sglang.srt.utils.auth import AuthLevel

    async def answer() -> str:
        return "yes"

    app, inner = FastAPI(openapi_url=None), APIRouter()
    inner.add_api_route("/scale_elastic_ep", answer, methods=["POST"])
    inner.add_api_route("/erase_everything", answer, methods=["POST"])
    app.include_router(inner)
    decide(app, has_admin_key=True)
    assert [route.path for route in app.routes] == ["/scale_elastic_ep"]
    assert app.routes[0].endpoint._auth_level is AuthLevel.ADMIN_OPTIONAL
    assert "/erase_everything is not served" in caplog.text


def test_a_path_from_the_environment_is_decided_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_OLLAMA_SHOW_ROUTE", "/show")
    assert set(known_paths(["/api/show", "/ping"])) == {"/api/show", "/show", "/ping"}


async def websocket_answer(api_key: str | None, *headers: tuple[bytes, bytes]) -> list[str]:
    sent = []

    async def connect() -> dict[str, str]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    async def accept(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})

    gate = RouteGate(accept, api=None, api_key=api_key, admin_api_key=None)
    await gate({"type": "websocket", "headers": headers}, connect, send)
    return sent


async def test_a_websocket_needs_the_key() -> None:
    """SGLang asks for none, and its sounds go to the engine as requests do."""
    key, other = (b"authorization", b"Bearer k"), (b"authorization", b"Bearer no")
    assert await websocket_answer("k", key) == await websocket_answer(None) == ["websocket.accept"]
    assert await websocket_answer("k") == await websocket_answer("k", other) == ["websocket.close"]
    assert await websocket_answer("k", key, other) == ["websocket.close"]


# --- What is told of settings -----------------------------------------------------------------


def test_text_is_told_only_where_it_cannot_be_a_secret() -> None:
    """Of every setting of the installed SGLang, also where it is nested."""
    from sglang.srt.server_args import ServerArgs

    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    names = {action.dest for action in parser._actions}
    plain = told(dict.fromkeys(names, "hunter2"))
    nested = told({"internal_states": [{name: {"a": ["hunter2"]} for name in names}]})
    shown = {name for name, value in plain.items() if value != STARS}
    (state,) = nested["internal_states"]
    assert {name for name, value in state.items() if value != {"a": [STARS]}} == shown
    assert shown <= {
        *("model_path", "tokenizer_path", "served_model_name", "revision", "weight_version"),
        *("model_impl", "device", "host", "fastapi_root_path", "log_level", "log_level_http"),
        *("speculative_algorithm", "cuda_graph_config"),
    }


def test_numbers_switches_and_choices_are_told() -> None:
    settings = {"tp_size": 2, "enable_metrics": True, "load_format": "auto", "api_key": None}
    assert told(settings) == settings
    assert told({"load_format": "hunter2", "launch_command": "serve --api-key hunter2"}) == {
        "load_format": STARS,
        "launch_command": STARS,
    }


# --- A server ---------------------------------------------------------------------------------


@dataclass
class Secrets:
    """A random text for every flag and variable that may hold a secret."""

    api_key: str = field(default_factory=secrets.token_hex)
    others: dict[str, str] = field(default_factory=dict)

    def new(self, name: str) -> str:
        return self.others.setdefault(name, secrets.token_hex())


@pytest.fixture(scope="module")
def hidden() -> Secrets:
    return Secrets()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("routes")


@pytest.fixture(scope="module")
def server(small_model: Path, directory: Path, hidden: Secrets) -> Iterator[LocalServer]:
    new = hidden.new
    storage = json.dumps({"secret_access_key": new("hicache_storage_backend_extra_config")})
    flags = [
        *("--model-path", str(small_model), "--dtype", "float32", "--served-model-name", "m"),
        *("--startup-profile-seconds", "0", "--enable-metrics", "--max-total-tokens", "8192"),
        *(
            "--coserve-data-dir",
            str(directory / "data"),
            "--record-plans",
            str(directory / "plans"),
        ),
        *("--tool-call-parser", "pythonic"),
        *("--api-key", hidden.api_key, "--admin-api-key", new("admin_api_key")),
        *("--batch-webhook-url", f"http://127.0.0.1:9/{new('batch_webhook_url')}"),
        *("--otlp-traces-endpoint", f"http://u:{new('otlp')}@127.0.0.1:9"),
        *("--hicache-storage-backend-extra-config", storage),
    ]
    environment = {
        "COSERVE_WEBHOOK_SECRET": "whsec_" + b64encode(new("webhook").encode()).decode(),
        "HF_TOKEN": new("hf_token"),
        "SGLANG_EXPOSE_OWN_ENV_VARS": "1",
    }
    hidden.others["webhook"] = environment["COSERVE_WEBHOOK_SECRET"]
    log = directory / "server.log"
    with LocalServer(flags, log_path=log, extra_env=environment) as running:
        yield running


@pytest.fixture
def key(hidden: Secrets) -> str:
    return hidden.api_key


def filled(path: str) -> str:
    return path.replace("{model:path}", "m").replace("{response_id}", "resp_1")


def readable(server: LocalServer, key: str) -> set[str]:
    """The paths of all routes that are read."""
    found = get(server, "/openapi.json", key).raise_for_status().json()["paths"]
    fixed = {filled(path) for decision in DECISIONS for path in decision.paths}
    return {path for path, methods in found.items() if "get" in methods} | fixed


def test_no_answer_log_or_record_has_a_secret(
    server: LocalServer, directory: Path, hidden: Secrets
) -> None:
    with client_of(server, hidden.api_key) as client:
        bad = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
        line = json.dumps({**bad, "body": {**PROMPT, "temperature": -1}}) + "\n"
        batch = create(client, line.encode(), endpoint="/v1/completions")
        assert completed(client, batch.id)["a"]["response"]["status_code"] == 400
    answers = {}
    for path in sorted(readable(server, hidden.api_key)):
        for key in (hidden.api_key, None):
            answers[path, key is None] = get(server, path, key)
    assert answers["/server_info", False].json()["model_path"]
    assert answers["/coserve/status", False].json()["replicas"]
    texts = {str(name): f"{each.headers}{each.text}" for name, each in answers.items()}
    refused = call(server, "POST", "/v1/completions", hidden.api_key, json={"prompt": {"a": 1}})
    texts["a refusal"] = refused.text
    files = [path for path in directory.rglob("*") if path.is_file()]
    texts |= {str(path): path.read_bytes().decode("latin-1") for path in files}
    assert any("plans" in name for name in texts)
    every = {"api_key": hidden.api_key, **hidden.others}
    found = [
        (name, flag) for name, text in texts.items() for flag, it in every.items() if it in text
    ]
    assert found == []


def test_what_is_managed_needs_the_admin_key(server: LocalServer, hidden: Secrets) -> None:
    """Routes of included routers as well."""
    managed = {
        path
        for decision in DECISIONS
        if decision.caller in (Caller.MANAGER, Caller.OPERATOR)
        for path in decision.paths
    }
    status = {path: call(server, "POST", path, hidden.api_key).status_code for path in managed}
    if module_for(version("sglang")) != "v17":
        assert status["/scale_elastic_ep"] == status["/open_session"] == 401
    assert set(status.values()) <= {401, 404, 405}
    admin = hidden.others["admin_api_key"]
    opened = call(server, "POST", "/open_session", admin, json={"capacity_of_str_len": 10})
    assert opened.status_code == 200


@pytest.mark.parametrize("path", ["/nowhere", "/v1/nowhere", "/coserve/nowhere", "/v1/files/a/b/c"])
def test_an_unknown_path_is_not_found(server: LocalServer, key: str, path: str) -> None:
    answer = get(server, path, key)
    assert answer.status_code == 404
    assert path in answer.json()["error"]["message"]


def test_another_method_is_told_which_to_use(server: LocalServer, key: str) -> None:
    answer = call(server, "DELETE", "/generate", key)
    assert answer.status_code == 405
    assert "POST, PUT" in answer.json()["error"]["message"]


def test_a_slash_at_the_end_leads_to_the_route(server: LocalServer, key: str) -> None:
    headers = {"authorization": f"Bearer {key}"}
    url = f"{server.base_url}/v1/completions/"
    answer = httpx2.post(url, json=PROMPT, headers=headers, follow_redirects=True, timeout=60)
    assert answer.raise_for_status().json()["choices"]


MESSAGES = [{"role": "user", "content": "x"}]
QUESTION = {"id": "q", "type": "score", "question": "Is it?", "levels": ["no", "yes"]}
ASKED = {"type": "score", "instructions": "Is it?", "criteria": ["no", "yes"]}
OF_TEMPLATES: dict[str, Any] = {
    "/v1/chat/completions": {"model": "m", "messages": MESSAGES},
    "/v1/responses": {"model": "m", "input": "x"},
    "/v1/decisions": {"model": "m", "input": "x", "questions": [QUESTION]},
    "/v1/systemone": {"model": "m", "state": "x", "questions": {"q": ASKED}},
}
"""A body for each route that renders a template with variables of the client's."""


@pytest.mark.parametrize("path", OF_TEMPLATES)
@pytest.mark.parametrize("name", ["chat_template", "max_length"])
def test_a_template_of_the_clients_is_refused(
    server: LocalServer, key: str, path: str, name: str
) -> None:
    body = {**OF_TEMPLATES[path], "chat_template_kwargs": {name: "{{ 'x' * 9 }}"}}
    answer = call(server, "POST", path, key, json=body)
    if answer.status_code != 404:  # SGLang 0.5.17 has no decisions.
        assert answer.status_code in (400, 422)
        assert f"{name} is no variable of a chat template" in answer.text


def test_empty_arguments_of_a_call_are_an_empty_object(server: LocalServer, key: str) -> None:
    """Some models write them so, and frameworks send them back."""
    function = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [function]},
        {"role": "tool", "content": "y", "tool_call_id": "c"},
    ]
    body = {"model": "m", "messages": messages, "max_tokens": 2}
    call(server, "POST", "/v1/chat/completions", key, json=body).raise_for_status()


def test_a_text_that_a_parser_takes_too_long_for_is_answered_as_text(
    server: LocalServer, key: str
) -> None:
    """On the server's own event loop; the text would take years."""
    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}
    body = {"text": SLOW, "tool_call_parser": "pythonic", "tools": [tool]}
    answer = call(server, "POST", "/parse_function_call", key, json=body)
    assert answer.raise_for_status().json() == {"normal_text": SLOW, "calls": []}
    body["text"] = "[a(x=1)]"
    found = call(server, "POST", "/parse_function_call", key, json=body).json()["calls"]
    assert [each["name"] for each in found] == ["a"]


# --- Refusals, metrics and ids ----------------------------------------------------------------


REFUSED: list[tuple[str, str, Any, int]] = [
    ("GET", "/nowhere", None, 404),
    ("DELETE", "/v1/completions", None, 405),
    ("GET", "/v1/models/other", None, 404),
    ("POST", "/v1/chat/completions", {"model": "m", "messages": []}, 400),
    ("POST", "/v1/chat/completions", {"model": "m", "messages": MESSAGES, "n": "x"}, 400),
    ("POST", "/v1/completions", {**PROMPT, "temperature": -1}, 400),
    ("POST", "/v1/completions", {**PROMPT, "coserve_class": "batch"}, 400),
    ("POST", "/v1/completions", "x" * (5 << 20), 413),
    ("POST", "/v1/responses", {"model": "m", "input": 5}, 400),
    ("POST", "/v1/embeddings", {"model": "m", "input": "x"}, 400),
    ("POST", "/generate", {"text": "x", "sampling_params": {"temperature": -1}}, 400),
    ("POST", "/tokenize", {"model": "m", "prompt": 5}, 400),
    ("POST", "/v1/score", {"model": "m", "query": 5}, 400),
    ("GET", "/v1/files/file-none", None, 404),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), REFUSED)
def test_a_refusal_has_the_form_of_openais(
    server: LocalServer, key: str, method: str, path: str, body: Any, status: int
) -> None:
    answer = call(server, method, path, key, json=body)
    assert answer.status_code == status
    content = answer.json()
    assert content.keys() == {"error"}
    assert content["error"].keys() >= {"message", "type", "param", "code"}
    assert isinstance(content["error"]["message"], str)


LONG = "x" * 100_000
INVALID: dict[str, Any] = {
    "/v1/chat/completions": {"model": "m", "messages": [{"role": LONG, "content": {LONG: LONG}}]},
    "/v1/completions": {"model": "m", "prompt": {LONG: LONG}},
    "/v1/responses": {"model": "m", "input": {LONG: LONG}},
    "/v1/messages": {"model": "m", "max_tokens": 1, "messages": LONG},
    "/generate": {"text": {LONG: LONG}},
    "/api/chat": {"model": "m", "messages": LONG},
    "/api/generate": {"model": "m", "prompt": LONG, "stream": False},
    "/parse_function_call": {"text": LONG, "tool_call_parser": "none", "tools": []},
    "/separate_reasoning": {"text": LONG, "reasoning_parser": "none"},
}


@pytest.mark.parametrize("path", INVALID)
def test_an_invalid_body_is_answered_without_the_body_and_paths(
    server: LocalServer, key: str, path: str
) -> None:
    answer = call(server, "POST", path, key, json=INVALID[path])
    assert answer.status_code == 400
    assert len(answer.content) < 6000
    assert "site-packages" not in answer.text and LONG[:1000] not in answer.text


def test_invalid_items_of_a_response_cost_no_more_than_one(server: LocalServer, key: str) -> None:
    """SGLang makes a chat of them, which had 29 faults for each: 20 MB for 72 kB."""
    item = {"role": "user", "content": [{"type": "input_file", "file_url": "x"}]}
    sizes = set()
    for count in (1, 500):
        body = {"model": "m", "input": [item] * count}
        answer = call(server, "POST", "/v1/responses", key, json=body)
        assert answer.status_code == 400
        sizes.add(len(answer.content))
    assert len(sizes) == 1 and sizes.pop() < 6000


def test_what_is_no_json_is_told_so(server: LocalServer, key: str) -> None:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    url = f"{server.base_url}/v1/completions"
    answer = httpx2.post(url, content=b'{"prompt": ', headers=headers, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("body: no valid JSON: ")


@pytest.mark.parametrize("path", ["/v1/models", "/coserve/batches", "/server_info", "/nowhere"])
def test_a_missing_key_is_refused_in_it_too(server: LocalServer, path: str) -> None:
    answer = get(server, path)
    assert answer.status_code == 401
    assert answer.json()["error"]["message"]


def test_other_protocols_have_their_own_form(server: LocalServer, key: str) -> None:
    messages = call(server, "POST", "/v1/messages", json={}).json()
    assert messages["type"] == "error"
    assert messages["error"] == {"type": "authentication_error", "message": "Unauthorized"}
    chat = call(server, "POST", "/api/chat", key, json={"model": "other", "messages": []}).json()
    assert isinstance(chat["error"], str)
    long = {"model": "m", "prompt": "word " * 2000, "stream": False}
    error = call(server, "POST", "/api/generate", key, json=long).json()["error"]
    assert error.startswith("The input (")


TOO_LONG = "word " * 2000
STREAMED: dict[str, dict[str, Any]] = {
    "/api/generate": {"prompt": TOO_LONG},
    "/api/chat": {"messages": [{"role": "user", "content": TOO_LONG}]},
    "/v1/completions": {"prompt": TOO_LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TOO_LONG}]},
    "/v1/messages": {"messages": [{"role": "user", "content": TOO_LONG}], "max_tokens": 2},
}


@pytest.mark.parametrize("path", STREAMED)
def test_a_stream_with_a_prompt_that_is_too_long_is_refused_in_the_form_of_its_protocol(
    server: LocalServer, key: str, path: str
) -> None:
    body = {"model": "m", "stream": True, **STREAMED[path]}
    answer = call(server, "POST", path, key, json=body)
    # The stream of Anthropic's protocol has an event for it.
    assert answer.status_code == (200 if path == "/v1/messages" else 400)
    assert "The input (" in answer.text
    if path.startswith("/api"):
        assert answer.json().keys() == {"error"} and isinstance(answer.json()["error"], str)


def test_a_stream_of_ollamas_is_whole(server: LocalServer, key: str) -> None:
    body = {"model": "m", "prompt": "The old mill", "options": {"num_predict": 5}}
    streamed = call(server, "POST", "/api/generate", key, json={**body, "stream": True})
    parts = [json.loads(line) for line in streamed.text.splitlines()]
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    empty = call(server, "POST", "/api/generate", key, json={"model": "m", "prompt": ""})
    assert json.loads(empty.text)["done"]


def test_unknown_paths_and_methods_make_no_series(server: LocalServer, key: str) -> None:
    mark = secrets.token_hex(8)
    asks = {"origin": "http://a", "access-control-request-method": "POST"}
    with httpx2.Client(
        base_url=server.base_url, headers={"authorization": f"Bearer {key}"}
    ) as http:
        assert http.get(f"/{mark}").status_code == 404
        assert http.post(f"/v1/models/{mark}").status_code == 405
        assert http.request(f"X{mark}", "/generate").status_code == 405
        assert http.options(f"/v1/models/{mark}", headers=asks).status_code == 200
        assert http.options(f"/{mark}").status_code == 404
        http.get("/v1/models").raise_for_status()
    found = get(server, "/metrics").raise_for_status().text
    assert 'endpoint="/v1/models"' in found
    assert mark not in found


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_of_several_choices_has_one_id(server: LocalServer, key: str, path: str) -> None:
    body = PROMPT if path == "/v1/completions" else OF_TEMPLATES[path]
    body = {**body, "n": 2, "stream": True, "max_tokens": 4, "temperature": 1}
    lines = call(server, "POST", path, key, json=body).raise_for_status().text.splitlines()
    events = [json.loads(each[6:]) for each in lines if each.startswith("data: {")]
    assert {choice["index"] for event in events for choice in event["choices"]} == {0, 1}
    assert len({event["id"] for event in events}) == 1
