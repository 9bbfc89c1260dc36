"""Background responses through the routes and OpenAI's client, on a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from fastapi import FastAPI, Request
from openai.types.responses import Response

from batch.live_app import LiveApp
from batch.route_calls import engine_has, finish, refused
from batch.scenarios import OWNER, Scene, opened, undelivered
from batch.scripted_backend import ScriptedBackend, failure, tokens_of
from sglang_coserve.batch.api import add_batch_routes
from sglang_coserve.batch.errors import NotFoundError, QuotaError
from sglang_coserve.batch.file_store import Transfers
from sglang_coserve.batch.job_lines import JobLines
from sglang_coserve.batch.responses.responses import BackgroundResponses, has_ended
from sglang_coserve.batch.responses.schemas import CreateResponse
from sglang_coserve.batch.routes.service import set_service
from sglang_coserve.batch.service import BatchService
from waiting import GIVE_UP_S, eventually

RETENTION_S = 7 * 86_400.0


@pytest.fixture
def app(tmp_path: Path) -> Iterator[LiveApp]:
    with LiveApp(tmp_path / "data", ScriptedBackend(holds=True), max_in_flight=1) as app:
        yield app


def responses_of(service: BatchService) -> BackgroundResponses:
    return BackgroundResponses(service.context, service.files, service.runner)


def begin(client: openai.OpenAI, name: str, **fields: Any) -> Response:
    return client.responses.create(
        model="small", input=name, background=True, service_tier="flex", **fields
    )


def posted(app: LiveApp, body: dict[str, Any]) -> httpx2.Response:
    return httpx2.post(
        f"{app.base_url}/v1/responses",
        content=json.dumps(body),  # Of httpx2 itself, a lone surrogate is none.
        headers={"content-type": "application/json"},
        timeout=GIVE_UP_S,
    )


def reaches(client: openai.OpenAI, response_id: str, status: str) -> Response:
    eventually(lambda: client.responses.retrieve(response_id).status == status)
    return client.responses.retrieve(response_id)


def text_of(name: str) -> str:
    return " ".join(map(str, tokens_of(name, 4)))


def test_from_queued_to_completed(app: LiveApp, client: openai.OpenAI) -> None:
    first = begin(client, "first", metadata={"run": "7"}, temperature=0.5)
    assert first.status == "queued"
    assert first.to_dict()["service_tier"] == "flex"
    assert (first.background, first.metadata, first.temperature) == (True, {"run": "7"}, 0.5)
    second = begin(client, "second")
    assert reaches(client, first.id, "in_progress").output == []
    assert client.responses.retrieve(second.id).status == "queued"
    finish(app, "first")
    done = reaches(client, first.id, "completed")
    assert done.output_text == text_of("first")
    assert (done.id, done.background, done.metadata) == (first.id, True, {"run": "7"})
    assert done.usage is not None
    assert reaches(client, second.id, "in_progress")
    assert app.backend.started[0].body == {
        "model": "small",
        "input": "first",
        "temperature": 0.5,
        "metadata": {"run": "7"},
    }


def test_it_has_no_stream(app: LiveApp, client: openai.OpenAI) -> None:
    response = begin(client, "one")
    with pytest.raises(openai.BadRequestError, match="ask GET") as caught:
        client.responses.retrieve(response.id, stream=True)
    refused(caught, 400, "unsupported_parameter", "stream")


def test_no_list_shows_it_and_no_other_key_has_it(app: LiveApp, client: openai.OpenAI) -> None:
    response = begin(client, "one")
    engine_has(app, 1)
    assert not client.batches.list().data
    assert not client.files.list().data
    with app.client("another key") as other:
        for call in (other.responses.retrieve, other.responses.cancel, other.responses.delete):
            with pytest.raises(openai.NotFoundError) as caught:
                call(response.id)
            refused(caught, 404, "response_not_found", "response_id")
    assert client.responses.retrieve(response.id).status == "in_progress"


def test_cancelled_it_leaves_the_engine_at_once(app: LiveApp, client: openai.OpenAI) -> None:
    response = begin(client, "one")
    engine_has(app, 1)
    assert client.responses.cancel(response.id).status == "cancelled"
    assert client.responses.cancel(response.id).status == "cancelled"
    client.responses.delete(response.id)
    engine_has(app, 0)
    done = begin(client, "two")
    engine_has(app, 1)
    finish(app, "two")
    reaches(client, done.id, "completed")
    assert client.responses.cancel(done.id).status == "completed"


def test_deleted_it_is_gone_with_its_files(app: LiveApp, client: openai.OpenAI) -> None:
    response = begin(client, "one")
    engine_has(app, 1)
    with pytest.raises(openai.ConflictError):
        client.responses.delete(response.id)
    finish(app, "one")
    reaches(client, response.id, "completed")
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    assert not list((app.data / "files").iterdir())


def test_what_the_engine_refuses_has_failed(app: LiveApp, client: openai.OpenAI) -> None:
    response = begin(client, "one")
    engine_has(app, 1)
    app.in_loop(lambda: app.backend.held("one").finish(failure(400)))
    failed = reaches(client, response.id, "failed")
    assert (failed.error.code, failed.error.message) == ("invalid_prompt", "no")


async def test_what_the_engine_failed_on_is_no_fault_of_the_request(tmp_path: Path) -> None:
    answers = lambda _: failure(503)  # noqa: E731
    scene = await opened(tmp_path, ScriptedBackend(answers=answers))
    async with scene.service as service:
        large = "x" * 10_000
        request = CreateResponse(background=True, input="x", user=large, temperature=0.5)
        begun = await responses_of(service).create(OWNER, request)
        assert begun["temperature"] == 0.5 and "user" not in begun

        async def look() -> dict[str, Any] | None:
            found = await responses_of(service).retrieve(OWNER, begun["id"])
            return found if has_ended(found) else None

        done = await scene.eventually(look)
        assert (done["status"], done["error"]["code"]) == ("failed", "server_error")


def test_a_request_that_is_sent_again_is_served_once(app: LiveApp, client: openai.OpenAI) -> None:
    headers = {"Idempotency-Key": "key"}
    first = begin(client, "one", extra_headers=headers)
    assert begin(client, "one", extra_headers=headers).id == first.id
    with pytest.raises(openai.ConflictError):
        begin(client, "other", extra_headers=headers)
    assert len(list((app.data / "files").iterdir())) == 1


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
        ({"store": False}, "invalid_value", "store"),
        ({"stream": True}, "unsupported_parameter", "stream"),
        ({"metadata": {"a": "x" * 513}}, "invalid_value", "metadata.a"),
        ({"extra_body": {"coserve_deadline_s": 0}}, "invalid_value", "coserve_deadline_s"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    app: LiveApp, fields: dict[str, Any], code: str, param: str | None
) -> None:
    body = {"input": "one", "background": True, **fields.pop("extra_body", {}), **fields}
    answer = posted(app, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert not list((app.data / "files").iterdir())


@pytest.mark.parametrize("fields", [{"max_output_tokens": 10**30}, {"user": "cut \ud83d"}])
def test_what_json_can_say_is_repeated(app: LiveApp, fields: dict[str, Any]) -> None:
    url = f"{app.base_url}/v1/responses"
    body = {"input": "one", "background": True, **fields}
    created = posted(app, body)
    assert created.status_code == 200
    found = httpx2.get(f"{url}/{created.json()['id']}", timeout=GIVE_UP_S)
    assert found.status_code == 200
    for answer in (created, found):
        assert json.loads(answer.content).items() >= fields.items()
    engine_has(app, 1)
    finish(app, "one")

    def ended() -> dict[str, Any] | None:
        found = httpx2.get(f"{url}/{created.json()['id']}", timeout=GIVE_UP_S).json()
        return found if has_ended(found) else None

    assert eventually(ended).items() >= fields.items()


def test_one_key_leaves_room_for_others(tmp_path: Path) -> None:
    backend = ScriptedBackend(holds=True)
    with (
        LiveApp(tmp_path / "data", backend, max_active_responses=4) as app,
        app.client() as client,
        app.client("another key") as other,
    ):
        for name in ("1", "2"):
            begin(client, name)
        with pytest.raises(openai.RateLimitError) as caught:
            begin(client, "3")
        assert caught.value.code == "too_many_responses"
        assert begin(other, "1").status == "queued"


def test_what_is_not_in_the_background_goes_on_to_the_routes_behind(tmp_path: Path) -> None:
    app = LiveApp(tmp_path / "data")

    async def behind(request: Request) -> Any:
        return {"body": (await request.body()).decode()}

    async def look_behind(response_id: str) -> str:
        return response_id

    app.app.add_api_route("/v1/responses", behind, methods=["POST"])
    app.app.add_api_route("/v1/responses/{response_id}", look_behind)
    with app:
        url = f"{app.base_url}/v1/responses"
        for body in ('{"input": "a"}', '{"background": false}', '"background"', '{"background"'):
            assert httpx2.post(url, content=body).json() == {"body": body}
        theirs = f"resp_{0:032x}"
        assert httpx2.get(f"{url}/{theirs}").json() == theirs
        assert httpx2.get(f"{url}/resp_{0:024x}").status_code == 404
    without = LiveApp(None)
    without.app.add_api_route("/v1/responses", behind, methods=["POST"])
    with without:
        url, body = f"{without.base_url}/v1/responses", '{"background": true}'
        assert httpx2.post(url, content=body).json() == {"body": body}


async def begun(scene: Scene, **fields: Any) -> str:
    request = CreateResponse.model_validate({"background": True, "input": "one", **fields})
    return str((await responses_of(scene.service).create(OWNER, request))["id"])


async def ended(scene: Scene, response_id: str) -> dict[str, Any]:
    async def look() -> dict[str, Any] | None:
        response = await responses_of(scene.service).retrieve(OWNER, response_id)
        return response if has_ended(response) else None

    return await scene.eventually(look)


async def test_a_repeated_call_is_answered_also_by_who_has_no_room(tmp_path: Path) -> None:
    scene = await opened(tmp_path, ScriptedBackend(holds=True), max_stored_bytes_per_owner=150)
    async with scene.service as service:
        request = CreateResponse(background=True, input="one")
        first, again = [await responses_of(service).create(OWNER, request, "key") for _ in range(2)]
        assert first["id"] == again["id"]
        with pytest.raises(QuotaError):
            await responses_of(service).create(OWNER, request, "another key")


async def test_it_and_its_files_are_kept_as_long_from_its_end_however_late_that_is(
    tmp_path: Path,
) -> None:
    scene = await opened(tmp_path, ScriptedBackend(holds=True), response_retention_s=RETENTION_S)
    async with scene.service as service:
        response_id = await begun(scene, coserve_deadline_s=30 * 86_400)
        await scene.in_flight(1)
        scene.clock.advance(RETENTION_S + 86_400)
        scene.backend.held("one").finish()
        assert (await ended(scene, response_id))["status"] == "completed"
        scene.clock.advance(RETENTION_S - 120)
        await service.context.delete_old(RETENTION_S, are_responses=True)
        assert (await responses_of(service).retrieve(OWNER, response_id))["output"]
        scene.clock.advance(120)

        async def is_gone() -> bool | None:
            scene.clock.advance(60)
            try:
                await responses_of(service).retrieve(OWNER, response_id)
            except NotFoundError:
                return not list((tmp_path / "files").iterdir()) or None
            return None

        assert await scene.eventually(is_gone)


async def test_one_that_is_not_served_in_time_has_failed(tmp_path: Path) -> None:
    scene = await opened(tmp_path, ScriptedBackend(holds=True))
    async with scene.service:
        response_id = await begun(scene, coserve_deadline_s=90)
        await scene.in_flight(1)
        scene.clock.advance(90)
        failed = await ended(scene, response_id)
        assert failed["status"] == "failed"
        assert failed["error"]["message"] == "not finished within 1m30s"
        assert scene.backend.in_flight == []


async def test_a_restart_continues_after_its_tokens(tmp_path: Path) -> None:
    scene = await opened(tmp_path, ScriptedBackend(holds=True))
    async with scene.service:
        response_id = await begun(scene)
        await scene.in_flight(1)
        scene.backend.held("one").generate(3)
    scene = await opened(tmp_path)
    async with scene.service:
        done = await ended(scene, response_id)
        assert done["output"][0]["content"][0]["text"] == text_of("one")
        assert [len(request.generated) for request in scene.backend.started] == [3]


async def test_webhooks_are_not_called(tmp_path: Path) -> None:
    scene = await opened(tmp_path, ScriptedBackend(tokens_per_s=100.0), event_delivery=undelivered)
    async with scene.service as service:
        await ended(scene, await begun(scene))
        assert (await service.status()).webhooks_pending == 0
        batch = await scene.create(b"")
        assert (await scene.ends(batch.id)).status == "failed"
        assert (await service.status()).webhooks_pending == 1


async def test_it_is_ours_behind_a_root_path(tmp_path: Path) -> None:
    scene, app = await opened(tmp_path), FastAPI()
    async with scene.service as service:
        add_batch_routes(app)
        set_service(app, service)
        transport = httpx2.ASGITransport(app=app, root_path="/x")
        async with httpx2.AsyncClient(transport=transport, base_url="http://h") as client:
            body = {"background": True, "input": "one"}
            assert (await client.post("/x/v1/responses", json=body)).status_code == 200


async def test_it_can_be_deleted_once_it_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, give_up = asyncio.Event(), JobLines.give_up

    async def late(self: JobLines, code: str, message: str) -> None:
        await gate.wait()
        await give_up(self, code, message)

    monkeypatch.setattr(JobLines, "give_up", late)
    scene = await opened(tmp_path, ScriptedBackend(holds=True))
    async with scene.service as service:
        response_id = await begun(scene, coserve_deadline_s=90)
        await scene.in_flight(1)
        scene.clock.advance(90)
        assert (await ended(scene, response_id))["status"] == "failed"
        deleting = asyncio.ensure_future(responses_of(service).delete(OWNER, response_id))
        await asyncio.sleep(0.05)
        gate.set()
        await deleting


def test_bodies_that_are_read_together_are_bounded_and_shared(app: LiveApp) -> None:
    pot = Transfers("bytes of requests", 2 * 1000)
    app.app.state.coserve_unread_responses = pot
    body = {"model": "small", "input": "x" * 1100, "background": True}
    refusal = posted(app, body)
    assert refusal.status_code == 429
    assert refusal.json()["error"]["code"] == "too_many_bytes_of_requests"
    assert pot.count == 0
    with pot.growing("another key") as take:
        take(1000)
        body["input"] = "x" * 400
        for _ in range(5):
            assert posted(app, body).status_code == 200
        assert pot.count == 1000
