"""The page and ``coserve top`` of a gateway before a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from calls import client_of, get
from client.coserve_process import coserve
from fleet.gateway_process import gateway
from sglang_coserve.local_server import LocalServer
from srt.batch_server.deployment import ADMIN_KEY, API_KEY, Deployment, create, lines
from waiting import eventually

CLIENT, OPERATOR = "client of the gateway", "operator of the gateway"


@pytest.fixture(scope="module")
def server(
    deployment: Deployment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalServer]:
    gone = ("--engine", "http://127.0.0.1:9")
    engines = ("--engine", deployment.base_url, *gone, "--engine-admin-key", ADMIN_KEY)
    keys = ("--api-key", CLIENT, "--admin-api-key", OPERATOR)
    with gateway(tmp_path_factory.mktemp("gateway"), *engines, *keys) as running:
        yield running


def view(server: LocalServer, key: str | None) -> httpx2.Response:
    return get(server, "/coserve/view", key)


def batch(server: LocalServer, count: int, max_tokens: int) -> str:
    return create(client_of(server, CLIENT), lines(count, max_tokens)).id


def _delay_s(server: LocalServer, batch_id: str) -> object:
    """What the batch says; 0 where the engine knows that it delayed nobody."""
    shown = client_of(server, CLIENT).batches.retrieve(batch_id).to_dict()
    return shown["coserve"]["online_delay_s"]  # type: ignore[index]


@pytest.mark.usefixtures("online_load")
def test_the_view_has_engines_users_and_batches_and_nothing_else(
    server: LocalServer, deployment: Deployment
) -> None:
    batch_id = batch(server, 20, 4)
    for key in (None, API_KEY, ADMIN_KEY):
        assert view(server, key).status_code == 401
    eventually(lambda: view(server, CLIENT).json()["online_users"]["requests"])
    eventually(lambda: _delay_s(server, batch_id) is not None)
    shown = view(server, CLIENT).json()
    assert shown.keys() == {
        *("at", "model", "online_users", "fleet", "engines", "batches", "headroom")
    }
    there, gone = shown["engines"]
    assert (there["url"], there["state"], gone["state"]) == (deployment.base_url, "up", "down")
    assert there["online_users"]["text"] in shown["online_users"]["text"]
    assert gone["online_users"] is None
    assert [each["id"] for each in shown["batches"]["data"]] == [batch_id]
    assert shown["batches"]["path"] == "/v1/batches"
    assert view(server, OPERATOR).json()["batches"]["path"] == "/coserve/batches"
    assert httpx2.get(f"{server.base_url}/coserve").status_code == 200


def test_top_shows_the_same(server: LocalServer, deployment: Deployment) -> None:
    batch_id = batch(server, 2, 4)
    batches = client_of(server, CLIENT).batches
    eventually(lambda: batches.retrieve(batch_id).status == "completed")
    address = ("--base-url", server.base_url, "--once")
    code, shown, errors = coserve("top", *address, "--api-key", CLIENT)
    assert (code, errors) == (0, "")
    for part in ("gateway", deployment.base_url, "up", "down", batch_id, "headroom"):
        assert part in shown
    assert "why" not in shown
    code, shown, _ = coserve("top", *address, "--plain", "--api-key", OPERATOR, "--as-operator")
    assert (code, len(shown.splitlines())) == (0, 1)
    assert "1 of 2 engines up" in shown


def test_the_page_shows_engines_and_pauses_a_batch(
    server: LocalServer, deployment: Deployment, browser: Any
) -> None:
    batch_id = batch(server, 3000, 64)
    faults: list[str] = []
    page = browser.new_page(viewport={"width": 360, "height": 800})
    page.set_default_timeout(120_000)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(f"{server.base_url}/coserve")
    page.get_by_label("--api-key").fill(CLIENT)
    page.get_by_role("button", name="Continue").click()
    engine: Any = page.locator(f"[data-engine='{deployment.base_url}']")
    engine.get_by_text("up", exact=True).wait_for()
    page.locator("#fleet").filter(has_text="1 of 2").wait_for()
    assert page.get_by_role("heading", name="What the engine does").count() == 0
    assert page.get_by_role("heading", name="Why").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    row = page.locator(f"[data-batch={batch_id}]")
    row.get_by_role("button", name="Pause").click()
    row.get_by_role("button", name="Resume").wait_for()
    row.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel the batch").click()
    row.get_by_role("button").first.wait_for(state="hidden")
    page.close()
    assert not faults
    client = client_of(server, CLIENT)
    eventually(lambda: client.batches.retrieve(batch_id).status == "cancelled")
