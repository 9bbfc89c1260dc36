"""Background responses through the routes and OpenAI's client, on a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI, Request
from openai.types.responses import Response

from batch.live_app import LiveApp
from batch.route_calls import engine_has, finish, refused
from batch.scenarios import NOBODY, OWNER, Scene, opened
from batch.scripted_backend import ScriptedBackend, failure, tokens_of
from sglang_coserve.batch.errors import NotFoundError, QuotaError
from sglang_coserve.batch.job_lines import JobLines
from sglang_coserve.batch.responses import has_ended
from sglang_coserve.batch.routes import add_batch_routes
from sglang_coserve.batch.routes.caller import set_service
from sglang_coserve.batch.schemas import CreateResponse
from waiting import GIVE_UP_S, eventually

RETENTION_S = 7 * 86_400.0


@pytest.fixture
def app(tmp_path: Path) -> Iterator[LiveApp]:
    with LiveApp(tmp_path / "data", ScriptedBackend(holds=True), max_in_flight=1) as app:
        yield app


def begin(client: openai.OpenAI, name: str, **fields: Any) -> Response:
    return client.responses.create(
        model="small", input=name, background=True, service_tier="flex", **fields
    )


def posted(app: LiveApp, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(
        f"{app.base_url}/v1/responses",
        content=json.dumps(body),  # Of httpx itself, a lone surrogate is none.
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


def test_a_chat_in_the_background(app: LiveApp, client: openai.OpenAI) -> None:
    """``openai`` finds it again, and deletes it, as it does a stored chat completion."""
    messages: Any = [{"role": "user", "content": "first"}]

    def begun(**fields: Any) -> Any:
        body = {"background": True, **fields}
        return client.chat.completions.create(
            model="small", messages=messages, service_tier="flex", extra_body=body
        )

    chat = begun(metadata={"run": "7"})
    assert (chat.id[:9], chat.status, chat.choices) == ("chatcmpl-", "queued", [])
    engine_has(app, 1)
    line = app.backend.started[0]
    assert line.endpoint == "/v1/chat/completions"
    assert line.body == {"model": "small", "messages": messages, "metadata": {"run": "7"}}
    assert not client.batches.list().data
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(chat.id.replace("chatcmpl-", "resp_"))
    finish(app, "first")
    eventually(lambda: client.chat.completions.retrieve(chat.id).status == "completed")
    done: Any = client.chat.completions.retrieve(chat.id)
    assert (done.id, done.object, done.metadata) == (chat.id, "chat.completion", {"run": "7"})
    assert done.choices[0].message.content == text_of("first")
    assert client.chat.completions.delete(chat.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(chat.id)
    other = begun()
    path = f"/chat/completions/{other.id}/cancel"
    assert client.post(path, cast_to=dict[str, Any])["status"] == "cancelled"
    with pytest.raises(openai.BadRequestError, match="has no stream"):
        begun(stream=True)


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
    found = httpx.get(f"{url}/{created.json()['id']}", timeout=GIVE_UP_S)
    assert found.status_code == 200
    for answer in (created, found):
        assert json.loads(answer.content).items() >= fields.items()
    engine_has(app, 1)
    finish(app, "one")
    streamed = httpx.get(f"{url}/{created.json()['id']}?stream=true", timeout=GIVE_UP_S)
    events = [json.loads(line[6:]) for line in streamed.text.split("\n") if line[:6] == "data: "]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"].items() >= fields.items()


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


def test_a_stream_waits_and_is_resumed_after_any_event(app: LiveApp, client: openai.OpenAI) -> None:
    with client.responses.create(
        model="small", input="one", background=True, stream=True
    ) as events:
        everything = [next(events) for _ in range(3)]
        engine_has(app, 1)
        finish(app, "one")
        everything += events
    kinds = ["response.created", "response.queued", "response.in_progress"]
    assert [event.type for event in everything[:3]] == kinds
    assert [event.sequence_number for event in everything] == list(range(len(everything)))
    assert everything[-1].type == "response.completed"
    assert everything[-1].response.output_text == text_of("one")
    deltas = [e.delta for e in everything if e.type == "response.output_text.delta"]
    assert "".join(deltas) == text_of("one")
    response_id = everything[0].response.id  # type: ignore[union-attr]
    for after in range(-1, len(everything)):
        with client.responses.retrieve(response_id, stream=True, starting_after=after) as rest:
            assert list(rest) == everything[after + 1 :]


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
            assert httpx.post(url, content=body).json() == {"body": body}
        theirs = f"resp_{0:032x}"
        assert httpx.get(f"{url}/{theirs}").json() == theirs
        assert httpx.get(f"{url}/resp_{0:024x}").status_code == 404
    without = LiveApp(None)
    without.app.add_api_route("/v1/responses", behind, methods=["POST"])
    with without:
        url, body = f"{without.base_url}/v1/responses", '{"background": true}'
        assert httpx.post(url, content=body).json() == {"body": body}


async def begun(scene: Scene, **fields: Any) -> str:
    request = CreateResponse.model_validate({"background": True, "input": "one", **fields})
    return str((await scene.service.responses.create(OWNER, request))["id"])


async def ended(scene: Scene, response_id: str) -> dict[str, Any]:
    async def look() -> dict[str, Any] | None:
        response = await scene.service.responses.retrieve(OWNER, response_id)
        return response if has_ended(response) else None

    return await scene.eventually(look)


async def test_a_repeated_call_is_answered_also_by_who_has_no_room(tmp_path: Path) -> None:
    scene = await opened(tmp_path, ScriptedBackend(holds=True), max_stored_bytes_per_owner=150)
    async with scene.service as service:
        request = CreateResponse(background=True, input="one")
        first, again = [await service.responses.create(OWNER, request, "key") for _ in range(2)]
        assert first["id"] == again["id"]
        with pytest.raises(QuotaError):
            await service.responses.create(OWNER, request, "another key")


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
        await service.responses.remove_expired()
        assert (await service.responses.retrieve(OWNER, response_id))["output"]
        scene.clock.advance(120)

        async def is_gone() -> bool | None:
            scene.clock.advance(60)
            try:
                await service.responses.retrieve(OWNER, response_id)
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


async def test_a_stream_ends_with_the_service(tmp_path: Path) -> None:
    scene = await opened(tmp_path, ScriptedBackend(holds=True))
    async with scene.service as service:
        response_id = await begun(scene)
        await scene.in_flight(1)
        events = service.responses.events(OWNER, response_id)
        seen = [await anext(events) for _ in range(4)]
        assert [event and event["sequence_number"] for event in seen] == [0, 1, 2, None]
        rest = asyncio.ensure_future(_all(events))
        await asyncio.sleep(0)
    async with asyncio.timeout(GIVE_UP_S):
        assert set(await rest) <= {None}


async def _all(events: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in events]


async def test_batches_learn_nothing_from_it_and_webhooks_are_not_called(tmp_path: Path) -> None:
    scene = await opened(tmp_path, ScriptedBackend(tokens_per_s=100.0), webhook=NOBODY)
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
        transport = httpx.ASGITransport(app=app, root_path="/x")
        async with httpx.AsyncClient(transport=transport, base_url="http://h") as client:
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
        deleting = asyncio.ensure_future(service.responses.delete(OWNER, response_id))
        await asyncio.sleep(0.05)
        gate.set()
        await deleting
