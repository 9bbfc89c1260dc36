"""``coserve gateway`` as a process, without torch and SGLang, before engines on sockets."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import httpx2
import openai
import pytest
from typer.testing import CliRunner

from batch.manual_clock import ManualClock
from batch.route_calls import completed, create, texts
from batch.scenarios import lines, opened
from batch.scripted_backend import ScriptedBackend, tokens_of
from calls import call, client_of, get
from fleet.gateway_process import GIVE_UP_S, EngineThread, fleet_of, gateway
from sglang_coserve.cli import app
from sglang_coserve.errors import ConfigError
from sglang_coserve.fleet.options import parse_options
from sglang_coserve.local_server import LocalServer, free_port
from waiting import eventually

HEAD_BYTES = 34
"""Of a journal; two tokens of a line take 20 more."""

API_KEY, OPERATOR = "client's key", "operator's key"


def scripted(count: int) -> dict[str, str]:
    return {f"id-{n}": " ".join(map(str, tokens_of(f"id-{n}", 4))) for n in range(1, count + 1)}


@pytest.fixture(scope="module")
def engines() -> Iterator[list[EngineThread]]:
    with EngineThread() as first, EngineThread() as second:
        yield [first, second]


@pytest.fixture(scope="module")
def server(
    engines: list[EngineThread], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalServer]:
    flags = [flag for engine in engines for flag in ("--engine", engine.url)]
    keys = ("--api-key", API_KEY, "--admin-api-key", OPERATOR)
    with gateway(tmp_path_factory.mktemp("gateway"), *flags, *keys) as server:
        yield server


def test_a_model_that_no_engine_serves_fails_the_batch(server: LocalServer) -> None:
    with client_of(server, API_KEY) as client:
        batch_id = create(client, lines(1) + lines(1, "other", model="gpt-4o")).id
        eventually(lambda: client.batches.retrieve(batch_id).status == "failed")
        batch = client.batches.retrieve(batch_id)
        assert batch.errors.data
        assert ("model_mismatch", 2) in [(each.code, each.line) for each in batch.errors.data]
        served = create(client, lines(1, model="adapter")).id
        eventually(lambda: client.batches.retrieve(served).status == "completed")
        assert client.batches.retrieve(served).to_dict()["model"] == "scripted:adapter"


def test_openais_client_gets_every_line_once_from_all_engines(
    server: LocalServer, engines: list[EngineThread]
) -> None:
    client = client_of(server, API_KEY)
    batch_id = create(client, lines(200)).id
    assert texts(completed(client, batch_id)) == scripted(200)
    eventually(lambda: all(e["lines_served"] for e in fleet_of(server, API_KEY)["engines"]))
    # Engines and gateway are those of all tests here: only this batch's lines are counted.
    started = [request for engine in engines for request in engine.backend.started]
    numbers = [request.line for request in started if request.batch_id == batch_id]
    assert sorted(numbers) == list(range(1, 201))


def test_status_and_metrics_tell_of_engines_and_batches(
    server: LocalServer, engines: list[EngineThread]
) -> None:
    status = get(server, "/coserve/status", API_KEY).json()
    told = {e["url"]: e for e in status["fleet"]["engines"]}
    assert told.keys() == {engine.url for engine in engines}
    assert {e["state"] for e in told.values()} == {"up"}
    assert status["fleet"]["model"] == status["batch_api"]["model"] == "scripted"
    view = get(server, "/coserve/view", API_KEY).json()
    assert {e["url"] for e in view["engines"]} == told.keys() and "engines" not in view["fleet"]
    metrics = get(server, "/metrics").text
    assert 'coserve_gateway_engines{state="up"} 2.0' in metrics
    assert "coserve_gateway_lines_waiting 0.0" in metrics
    assert 'coserve_batches{model_name="scripted",state="in_progress"} 0.0' in metrics
    assert 'coserve_batch_required_tokens_per_second{model_name="scripted"} 0.0' in metrics
    assert get(server, "/health").status_code == 200


def test_keys_are_checked_as_by_a_single_server(server: LocalServer) -> None:
    for path in ("/v1/files", "/v1/batches", "/coserve/status", "/openapi.json"):
        assert get(server, path).status_code == 401
        assert get(server, path, OPERATOR).status_code == 401
        assert get(server, path, API_KEY).status_code == 200
    assert get(server, "/coserve/").status_code == 307  # To the page, which needs none.
    assert get(server, "/coserve/batches", API_KEY).status_code == 401
    assert get(server, "/coserve/batches", OPERATOR).status_code == 200
    assert call(server, "OPTIONS", "/v1/files").status_code == 401


def with_headers(server: LocalServer, path: str, *values: str) -> httpx2.Response:
    headers = [("authorization", value) for value in values]
    return httpx2.get(f"{server.base_url}{path}", headers=headers, timeout=GIVE_UP_S)


def test_a_refusal_has_the_form_of_openais(server: LocalServer) -> None:
    for method, path, key, status in (
        ("GET", "/nowhere", API_KEY, 404),
        ("DELETE", "/health", API_KEY, 405),
        ("GET", "/v1/files", None, 401),
    ):
        answer = call(server, method, path, key)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


def test_who_sends_an_online_request_is_told_where_it_goes(server: LocalServer) -> None:
    with client_of(server, API_KEY) as client, pytest.raises(openai.NotFoundError, match="router"):
        client.completions.create(model="scripted", prompt="hi")


def test_a_key_is_read_in_one_way_by_all_who_ask_for_it(server: LocalServer) -> None:
    paths = {"/v1/batches": API_KEY, "/coserve/view": API_KEY, "/coserve/batches": OPERATOR}
    for path, key in paths.items():
        for scheme in ("Bearer", "bearer", "BEARER"):
            assert with_headers(server, path, f"{scheme} {key}").status_code == 200
        for scheme in ("Basic", "Bearer2"):
            assert with_headers(server, path, f"{scheme} {key}").status_code == 401
        for values in ((f"Bearer {key}", "Bearer a"), ("Bearer a", f"Bearer {key}")):
            # None of them makes anybody else of who has the other.
            assert with_headers(server, path, *values).status_code in (400, 401)


def test_the_standby_goes_on_where_the_gateway_was_killed(tmp_path: Path) -> None:
    with EngineThread(holds=True) as engine:
        active = gateway(tmp_path, "--engine", engine.url, "--log-level", "warning")
        port = free_port()
        standby = gateway(tmp_path, "--engine", engine.url, port=port, name="standby")
        url = f"http://127.0.0.1:{port}"
        with active:
            client = client_of(active)
            batch_id = create(client, lines(12)).id
            eventually(lambda: len(engine.backend.in_flight) == 12)
            # It is ready when it has taken over: until then it says why it is not.
            starting = threading.Thread(target=standby.start)
            starting.start()
            try:
                eventually(lambda: _says(f"{url}/health", "another gateway has"))
                assert httpx2.get(f"{url}/ping").status_code == 200
                refused = httpx2.get(f"{url}/v1/batches")
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "not_ready"
                active.kill()
            finally:
                starting.join(GIVE_UP_S)
        try:
            eventually(lambda: len(engine.backend.in_flight) == 12)
            engine.finish_all()
            assert texts(completed(client_of(standby), batch_id)) == scripted(12)
        finally:
            standby.stop()


def test_a_response_in_the_background_outlives_its_gateway(tmp_path: Path) -> None:
    with EngineThread(holds=True) as engine:
        flags = ("--engine", engine.url, "--log-level", "warning")
        with gateway(tmp_path, *flags) as first:
            client = client_of(first)
            response = client.responses.create(input="one", background=True, service_tier="flex")
            assert response.status == "queued"
            eventually(lambda: len(engine.backend.in_flight) == 1)
            assert client.responses.retrieve(response.id).status == "in_progress"
            first.kill()
        with gateway(tmp_path, *flags) as second:
            client = client_of(second)
            eventually(lambda: len(engine.backend.in_flight) == 1)
            with pytest.raises(openai.NotFoundError):
                client_of(second, "another key").responses.retrieve(response.id)
            engine.finish_all()
            eventually(lambda: client.responses.retrieve(response.id).status == "completed")
            answer = client.responses.retrieve(response.id).output_text
            assert answer == " ".join(map(str, tokens_of("one", 4)))
            # A proxy tells by this status that the router is meant.
            with pytest.raises(openai.APIStatusError, match="router") as refused:
                client.responses.create(input="one")
            assert refused.value.status_code == 421


def test_ctrl_c_ends_it_in_order_and_the_next_one_goes_on(tmp_path: Path) -> None:
    with EngineThread(holds=True) as engine:
        flags = ("--engine", engine.url)
        with gateway(tmp_path, *flags) as first:
            batch_id = create(client_of(first), lines(5)).id
            eventually(lambda: len(engine.backend.in_flight) == 5)
            os.kill(first.pid, signal.SIGINT)
            assert first._process.wait(GIVE_UP_S) == 130
            eventually(lambda: not engine.backend.in_flight)
            assert "Traceback" not in first.log_tail()
        with gateway(tmp_path, *flags) as second:
            eventually(lambda: len(engine.backend.in_flight) == 5)
            engine.finish_all()
            assert texts(completed(client_of(second), batch_id)) == scripted(5)


def required_per_s(server: LocalServer, model: str) -> float:
    """What KEDA asks for."""
    name = f'coserve_batch_required_tokens_per_second{{model_name="{model}"}} '
    (line,) = (text for text in get(server, "/metrics").text.splitlines() if text.startswith(name))
    return float(line.removeprefix(name))


def test_what_a_key_has_is_there_for_the_next_key(tmp_path: Path) -> None:
    keys = (None, "first", "second", None)
    flags = ["--engine", f"http://localhost:{free_port()}", "--admin-api-key", OPERATOR]
    files = []
    for number, key in enumerate(keys):
        with gateway(tmp_path, *flags, *(("--api-key", key) if key else ())) as server:
            # Without --api-key each key is an owner.
            with client_of(server, key or keys[1]) as client:
                if number < 3:
                    files.append(client.files.create(file=lines(1), purpose="batch").id)
                    assert [each.id for each in client.files.list()] == files[::-1]
                    continue
                assert list(client.files.list()) == []
            owner = httpx2.post(
                f"{server.base_url}/coserve/owners/everybody/move",
                json={"to": sha256(b"first").hexdigest()},
                headers={"authorization": f"Bearer {OPERATOR}"},
                timeout=GIVE_UP_S,
            )
            assert owner.json()["files"] == 3
            with client_of(server, "first") as client:
                assert len(list(client.files.list())) == 3


def test_batches_are_accepted_before_there_is_an_engine(tmp_path: Path) -> None:
    port = free_port()
    with gateway(tmp_path, "--engine-dns", f"http://localhost:{port}") as server:
        client = client_of(server)
        assert not client.models.list().data
        batch_id = create(client, lines(3)).id
        eventually(lambda: client.batches.retrieve(batch_id).status == "in_progress")
        batch = client.batches.retrieve(batch_id).to_dict()["coserve"]
        assert "no engine takes lines now" in batch["warning"]  # type: ignore[index]
        assert {e["state"] for e in fleet_of(server)["engines"]} == {"down"}
        assert required_per_s(server, "") > 0
        with EngineThread(port=port):
            assert texts(completed(client, batch_id)) == scripted(3)
            assert [model.id for model in client.models.list()] == ["scripted", "adapter"]
            kept = tmp_path / "data" / "served_model.json"
            eventually(kept.exists)
    # Engines are gone, and the gateway is another one: it knows what there was.
    with gateway(tmp_path, "--engine-dns", f"http://localhost:{port}") as server:
        client = client_of(server)
        assert [model.id for model in client.models.list()] == ["scripted", "adapter"]
        assert client.models.retrieve("adapter").id == "adapter"
        with pytest.raises(openai.NotFoundError, match="use 'scripted', 'adapter'"):
            client.models.retrieve("another")
        batch_id = create(client, lines(2)).id
        eventually(lambda: client.batches.retrieve(batch_id).status == "in_progress")
        warning = client.batches.retrieve(batch_id).to_dict()["coserve"]["warning"]  # type: ignore[index]
        assert "more than one model" not in warning
        assert required_per_s(server, "scripted") > 0
        with EngineThread(port=port):
            assert texts(completed(client, batch_id)) == scripted(2)


def test_tokens_are_kept_of_a_batch_that_waited_for_the_first_engine(tmp_path: Path) -> None:
    port = free_port()
    flags = ("--engine-dns", f"http://localhost:{port}")
    with gateway(tmp_path, *flags) as first:
        batch_id = create(client_of(first), lines(2)).id
        eventually(lambda: client_of(first).batches.retrieve(batch_id).status == "in_progress")
        with EngineThread(port=port, holds=True) as engine:
            eventually(lambda: len(engine.backend.in_flight) == 2)
            engine.generate_all(2)
            journal = tmp_path / "data" / "journal" / batch_id
            eventually(lambda: journal.exists() and journal.stat().st_size >= HEAD_BYTES + 2 * 20)
            first.kill()
            eventually(lambda: not engine.backend.in_flight)
            with gateway(tmp_path, *flags):
                eventually(lambda: len(engine.backend.in_flight) == 2)
                assert all(len(held.request.generated) == 2 for held in engine.backend.in_flight)


def create_with_a_typo(server: LocalServer, request_id: str) -> str:
    """Create a batch, of which the log tells; return the id of the request in the answer."""
    client = client_of(server)
    file = client.files.create(file=("input.jsonl", lines(1)), purpose="batch")
    answer = client.batches.with_raw_response.create(
        input_file_id=file.id,
        endpoint="/v1/completions",
        completion_window="24h",
        extra_body={"prioritie": 1},
        extra_headers={"x-request-id": request_id},
    )
    return str(answer.headers["x-request-id"])


def test_its_log_as_text_names_the_request(tmp_path: Path) -> None:
    with gateway(tmp_path, "--engine", "http://127.0.0.1:1") as server:
        create_with_a_typo(server, "trace-7")
        log = server.log_tail()
    assert re.search(r"WARNING \[trace-7\] batch \w+: 'fields that this server does not know", log)
    assert "WARNING [-] batches in" in log


def test_each_line_of_its_log_is_json_and_names_the_request(tmp_path: Path) -> None:
    with gateway(tmp_path, "--engine", "http://127.0.0.1:1", "--log-format", "json") as server:
        assert create_with_a_typo(server, "trace-7") == "trace-7"
        last = create_with_a_typo(server, "two words")
        assert last != "two words"
    records = [json.loads(line) for line in (tmp_path / "gateway.log").read_text().splitlines()]
    assert all(record.keys() >= {"at", "level", "logger", "message"} for record in records)
    told = [r.get("request_id") for r in records if "does not know" in r["message"]]
    assert told == ["trace-7", last]


def _says(url: str, text: str) -> bool:
    try:
        return text in httpx2.get(url, timeout=5).text
    except httpx2.TransportError:
        return False


def test_batches_of_a_server_that_does_not_start_are_shown_and_changed(tmp_path: Path) -> None:
    async def server() -> list[str]:
        backend, clock = ScriptedBackend(holds=True), ManualClock(time.time())
        scene = await opened(tmp_path / "data", backend, clock)
        async with scene.service:
            batches = [await scene.create(lines(2)) for _ in range(2)]
            for batch in batches:
                await scene.reaches(batch.id, "in_progress")
            await scene.in_flight(4)
        return [batch.id for batch in batches]

    def coserve(*arguments: str) -> str:
        flags = ("--as-operator", "--base-url", stand_in.base_url, "--api-key", OPERATOR)
        result = CliRunner().invoke(app, [*arguments, *flags])
        assert result.exit_code == 0, result.output
        return result.output

    first, second = asyncio.run(server())
    flags = ("--engine", f"http://127.0.0.1:{free_port()}", "--admin-api-key", OPERATOR)
    with gateway(tmp_path, *flags) as stand_in:
        eventually(lambda: get(stand_in, "/health", OPERATOR).status_code == 200)
        assert [row.split()[0] for row in coserve("list").splitlines()] == [second, first]
        assert "cancel" in coserve("cancel", first)
        eventually(lambda: "  cancelled  " in coserve("status", first))

    async def next_server() -> None:
        scene = await opened(tmp_path / "data", clock=ManualClock(time.time()))
        async with scene.service:
            assert (await scene.ends(second)).status == "completed"
            assert {request.batch_id for request in scene.backend.started} == {second}

    asyncio.run(next_server())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        # As of a file with a line break at its end.
        (("--engine-admin-key", "k\n"), "line break"),
        (("--api-key", "k\n"), "line break"),
        (("--api-key", "k "), "space"),
        (("--admin-api-key", "k\n"), "line break"),
        (("--engine", "http://a:1/v1"), "http://a:1/v1"),
        (("--engine", "http://a:1?b=c"), "use http://HOST:PORT"),
        (("--engine", "http://user:pw@a:1"), "neither a user name"),
    ],
)
def test_what_no_gateway_could_use_is_told_before_it_starts(
    flags: tuple[str, ...], says: str
) -> None:
    given = ("--engine", "http://a:1", "--engine-admin-key", "k", "--coserve-data-dir", "d")
    with pytest.raises(ConfigError, match=says):
        parse_options((*given, *flags))
