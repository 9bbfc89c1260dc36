"""Everybody's batches, for who has the admin key and nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest
from openai.types import FileObject

from batch.live_app import LiveApp
from batch.route_calls import create, engine_has, records, until
from batch.scenarios import lines
from batch.scripted_backend import ScriptedBackend
from client.coserve_process import coserve
from sglang_coserve.web.keys import owner_of

ADMIN = "the admin's key"


@pytest.fixture
def app(tmp_path: Path) -> Iterator[LiveApp]:
    backend = ScriptedBackend(holds=True)
    with LiveApp(tmp_path / "data", backend, admin_key=ADMIN) as app:
        yield app


def admin(app: LiveApp, method: str, path: str, key: str | None = ADMIN) -> httpx2.Response:
    value = f"Bearer {key}".strip().encode("latin-1")
    headers = {} if key is None else {b"authorization": value}
    return httpx2.request(method, f"{app.base_url}/coserve/batches{path}", headers=headers)


def test_what_a_key_had_is_given_to_another(app: LiveApp) -> None:
    with app.client("old") as old, app.client("new") as new:
        batch = old.batches.create(
            input_file_id=(file := upload(old)).id,
            endpoint="/v1/completions",
            completion_window="24h",
            extra_headers={"idempotency-key": "k"},
        )
        other = new.batches.create(
            input_file_id=upload(new).id,
            endpoint="/v1/completions",
            completion_window="24h",
            extra_headers={"idempotency-key": "k"},
        )
        engine_has(app, 2)
        address = f"{app.base_url}/coserve/owners/{owner_of('old')}/move"
        body = {"to": owner_of("new")}
        key = {"authorization": f"Bearer {ADMIN}"}
        assert httpx2.post(address, json=body, headers={"authorization": "Bearer new"}).is_error
        assert httpx2.post(address, json={"to": "new"}, headers=key).status_code == 400
        assert httpx2.post(address.replace("owners/", "owners/x"), json=body, headers=key).is_error
        moved = httpx2.post(address, json=body, headers=key).raise_for_status().json()
        assert (moved["files"], moved["batches"]) == (1, 1)
        assert {each.id for each in new.batches.list()} == {batch.id, other.id}
        assert list(old.batches.list()) == []
        app.in_loop(app.backend.finish_all)
        done = until(new, batch.id, "completed")
        assert list(records(new, done.output_file_id)) == ["id-1"]
        assert new.files.retrieve(file.id).id == file.id


def upload(client: openai.OpenAI) -> FileObject:
    return client.files.create(file=("in.jsonl", lines(1)), purpose="batch")


def test_the_operator_sees_and_ends_anybodys(app: LiveApp) -> None:
    with app.client("alice") as alice, app.client("bob") as bob:
        of_alice = [create(alice, lines(2, f"a{n}")).id for n in range(3)]
        of_bob = create(bob, lines(2, "b")).id
        page = admin(app, "GET", "?limit=3").json()
        assert [batch["id"] for batch in page["data"]] == [of_bob, *of_alice[:0:-1]]
        assert page["has_more"]
        rest = admin(app, "GET", f"?after={page['last_id']}").json()
        assert [batch["id"] for batch in rest["data"]] == of_alice[:1]
        assert not rest["has_more"]

        owner = page["data"][0]["coserve"]["owner"]
        assert owner == owner_of("bob")
        (only,) = admin(app, "GET", f"?owner={owner}").json()["data"]
        assert only["id"] == of_bob

        engine_has(app, 8)
        paused = admin(app, "POST", f"/{of_bob}/pause").json()
        assert paused["coserve"]["paused"]
        engine_has(app, 6)
        assert not admin(app, "POST", f"/{of_bob}/resume").json()["coserve"]["paused"]
        engine_has(app, 8)
        app.in_loop(lambda: app.backend.held("b-1").finish())
        assert admin(app, "POST", f"/{of_bob}/cancel").json()["status"] == "cancelling"
        ended = until(bob, of_bob, "cancelled")
        assert list(records(bob, ended.output_file_id)) == ["b-1"], "it stays its owner's"
        (only,) = admin(app, "GET", "?status=cancelled").json()["data"]
        assert only["id"] == admin(app, "GET", f"/{of_bob}").json()["id"] == of_bob
        # Nobody's key has become more than it was.
        assert admin(app, "GET", f"/{of_bob}", key="alice").status_code == 401
        with pytest.raises(openai.NotFoundError):
            alice.batches.retrieve(of_bob)
        with app.client(ADMIN) as someone:
            assert someone.batches.list().data == []


@pytest.mark.parametrize("key", [None, "", "key", ADMIN + "x", ADMIN[:-1], "\xe9"])
@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("GET", "/x"), ("POST", "/x/cancel")])
def test_other_keys_are_refused(app: LiveApp, method: str, path: str, key: str | None) -> None:
    answer = admin(app, method, path, key)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


def test_without_an_admin_key_nobody_is_the_operator(tmp_path: Path) -> None:
    with LiveApp(tmp_path / "data") as app:
        answer = admin(app, "GET", "", key="")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "no_admin_key")


def test_the_document_says_that_a_key_is_needed(app: LiveApp) -> None:
    document = app.app.openapi()
    for path, item in document["paths"].items():
        for operation in item.values():
            assert bool(operation.get("security")) == path.startswith("/coserve/"), path
    assert document["components"]["securitySchemes"]["admin key"]["scheme"] == "bearer"


def test_the_command_line_of_an_operator(app: LiveApp) -> None:
    with app.client("alice") as alice:
        batch_id = create(alice, lines(2)).id
        server = ("--base-url", app.base_url, "--api-key")
        code, stdout, _ = coserve("list", "--as-operator", *server, ADMIN)
        assert code == 0
        assert batch_id in stdout and owner_of("alice") in stdout
        owner = ("--owner", owner_of("bob"))
        assert coserve("list", "--as-operator", *owner, *server, ADMIN) == (0, "", "")
        assert coserve("list", *server, ADMIN) == (0, "", "")
        code, _, stderr = coserve("list", *owner, *server, ADMIN)
        assert (code, "--as-operator" in stderr) == (2, True)
        code, _, stderr = coserve("cancel", batch_id, "--as-operator", *server, "alice")
        assert code == 3 and "refuses the API key" in stderr
        code, stdout, _ = coserve("cancel", batch_id, "--as-operator", *server, ADMIN)
        assert code == 0 and "cancelling" in stdout
        until(alice, batch_id, "cancelled")
        code, stdout, _ = coserve("status", batch_id, "--as-operator", *server, ADMIN)
        assert code == 0 and "cancelled" in stdout
