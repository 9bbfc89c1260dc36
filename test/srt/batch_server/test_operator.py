"""The operator's routes behind SGLang's own check of keys."""

from __future__ import annotations

import openai
import pytest

from batch.route_calls import until
from sglang_coserve.srt.routes.batch_api import open_routes_warning
from srt.batch_server.deployment import ADMIN_KEY, API_KEY, Deployment, create, lines


def test_the_admin_key_opens_the_operators_routes_and_no_others(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    batch_id = create(client, lines(100, 500)).id  # Until it is cancelled.
    until(client, batch_id, "in_progress")
    listed = deployment.ask("GET", "/coserve/batches?status=in_progress", ADMIN_KEY)
    assert batch_id in [batch["id"] for batch in listed.json()["data"]]
    for key in (API_KEY, "another", None):
        for method, path in (
            ("GET", "/batches"),
            ("GET", f"/batches/{batch_id}"),
            ("POST", f"/batches/{batch_id}/cancel"),
            ("POST", f"/batches/{batch_id}/pause"),
            ("POST", f"/batches/{batch_id}/resume"),
            ("GET", "/drain"),
            ("POST", "/drain"),
            ("DELETE", "/drain"),
            ("GET", "/lines"),
            ("POST", "/lines"),
        ):
            answer = deployment.ask(method, f"/coserve{path}", key)
            assert answer.status_code == 401, (key, method, path)
    for path in ("/v1/files", "/v1/batches", "/coserve/status"):
        assert deployment.ask("GET", path, ADMIN_KEY).status_code == 401
        assert deployment.ask("GET", path, API_KEY).status_code == 200
    assert deployment.ask("GET", "/coserve/load", API_KEY).status_code == 401
    assert deployment.ask("GET", "/coserve/load", ADMIN_KEY).json()["model_name"] == "small"
    assert client.batches.retrieve(batch_id).status == "in_progress"
    cancelled = deployment.ask("POST", f"/coserve/batches/{batch_id}/cancel", ADMIN_KEY)
    assert cancelled.json()["status"] == "cancelling"
    until(client, batch_id, "cancelled")
    document = deployment.ask("GET", "/openapi.json", API_KEY).json()
    assert document["paths"]["/coserve/batches/{batch_id}/{action}"]["post"]["security"]


@pytest.mark.parametrize(
    ("api_key", "admin_key", "is_warned"),
    [(None, None, False), ("a", None, False), ("a", "b", False), (None, "b", True)],
)
def test_an_admin_key_alone_leaves_the_other_routes_open(
    api_key: str | None, admin_key: str | None, is_warned: bool
) -> None:
    warning = open_routes_warning(api_key, admin_key)
    assert (warning is not None) == is_warned
    assert warning is None or "add --api-key" in warning
