"""What ``/coserve/view`` says, and to whom."""

from __future__ import annotations

import time
from typing import Any

import httpx2
import openai
import pytest

from batch.route_calls import until
from calls import get
from sglang_coserve.batch.routes.view import Caller, Keys
from sglang_coserve.web.keys import owner_of
from srt.batch_server.deployment import ADMIN_KEY, API_KEY, Deployment, create, lines
from waiting import eventually

ALL = Caller(None, "/coserve/batches", is_operator=True)
NO_BATCHES = Caller(None, None)


def own(key: str | None) -> Caller:
    return Caller(owner_of(key), "/v1/batches")


@pytest.mark.parametrize(
    ("keys", "key", "caller"),
    [
        (Keys(None, None), None, own(None)),
        (Keys(None, None), "mine", own("mine")),
        (Keys("api", None), "api", own(None)),
        (Keys("api", None), None, None),
        (Keys("api", None), "other", None),
        (Keys("api", None, is_open=True), None, NO_BATCHES),
        (Keys("api", None, is_open=True), "other", None),
        (Keys("api", "admin"), "admin", ALL),
        (Keys("api", "admin"), "api", own(None)),
        (Keys("api", "admin"), None, None),
        (Keys(None, "admin"), "admin", ALL),
        (Keys(None, "admin"), None, own(None)),
    ],
)
def test_a_key_shows_the_batches_that_it_opens(
    keys: Keys, key: str | None, caller: Caller | None
) -> None:
    headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
    assert keys.caller(headers) == caller


def view(deployment: Deployment, key: str | None = API_KEY, since: float = 0) -> dict[str, Any]:
    answer = get(deployment, f"/coserve/view?since={since}", key).raise_for_status()
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


def test_the_page_needs_no_key_and_what_it_shows_does(deployment: Deployment) -> None:
    page = get(deployment, "/coserve")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert get(deployment, "/coserve/", None).headers["location"] == "../coserve"
    assert get(deployment, "/coserve/view", "another").status_code == 401
    assert get(deployment, "/coserve/view?since=soon", API_KEY).status_code == 400
    posted = httpx2.post(f"{deployment.base_url}/coserve/view", timeout=60)
    assert posted.status_code == 405
    assert get(deployment, "/coserve/status").status_code == 401  # SGLang's check is in place.


def test_each_key_sees_its_batches(deployment: Deployment, client: openai.OpenAI) -> None:
    batch_id = create(client, lines(2)).id
    until(client, batch_id, "completed")
    assert view(deployment, None)["batches"] == {"path": None, "data": []}
    for key, path in ((API_KEY, "/v1/batches"), (ADMIN_KEY, "/coserve/batches")):
        batches = view(deployment, key)["batches"]
        assert batches["path"] == path
        (shown,) = (batch for batch in batches["data"] if batch["id"] == batch_id)
        assert shown["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


@pytest.mark.usefixtures("online_load")
def test_the_last_minutes_are_there_under_load(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    began_s = time.time()
    batch_id = create(client, lines(500, 64)).id
    until(client, batch_id, "in_progress")

    def has_both() -> bool:
        shown = view(deployment, since=began_s)
        shares = [shown["history"].get(f"{name}_share", []) for name in ("online", "offline")]
        names = ("offline_tokens_per_s", "offline_kv_tokens")
        has_offline = all(any(shown["history"].get(name, [])) for name in names)
        return has_offline and bool(shown["decisions"]) and all(map(any, shares))

    eventually(has_both)
    shown = view(deployment)
    history = shown["history"]
    assert len({len(column) for column in history.values()}) == 1
    assert history["at"] == sorted(history["at"])
    assert view(deployment, since=history["at"][-1] + 3600)["history"]["at"] == []
    total = sum(history[f"{who}_kv_tokens"][-1] for who in ("online", "offline", "cached", "free"))
    assert 0 < total <= 65_536
    assert shown["policy"] == "coserve"
    assert shown["model"] == "small"
    assert shown["sample_age_s"] < 60
    headroom = shown["headroom"]
    assert headroom["tokens_per_s"] > 0
    assert headroom["required_tokens_per_s"] > 0
    users = shown["online_users"]
    assert users["requests"] > 0
    assert users["slos"][0]["slo"] == "ttft p99 <= 400ms"
    assert users["slos"][0]["limit_ms"] == 400
    # Few streams are not judged.
    levels = ("ok", "harmed", "overloaded")
    eventually(lambda: view(deployment)["online_users"]["level"] in levels)
    client.batches.cancel(batch_id)
    until(client, batch_id, "cancelled")
