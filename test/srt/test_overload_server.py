"""Overload over HTTP: what can no longer make it gets a 503 that says when to come back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_coserve.local_server import LocalServer

TEXT = "Who repaired the boat?"
MESSAGES: Any = [{"role": "user", "content": TEXT}]
DOORS: dict[str, dict[str, Any]] = {
    "/generate": {"text": TEXT, "sampling_params": {"max_new_tokens": 2}},
    "/v1/completions": {"model": "default", "prompt": TEXT, "max_tokens": 2},
    "/v1/chat/completions": {"model": "default", "messages": MESSAGES, "max_tokens": 2},
}
LATE = {"coserve_slo_ttft_ms": 0.001}
"""Nobody can meet it."""


@pytest.fixture(scope="module")
def server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    flags = ["--model-path", str(small_model), "--dtype", "float32", "--enable-metrics"]
    flags += ["--slo-ttft-ms", "60000", "--startup-profile-seconds", "0"]
    flags += ["--overload", "shed"]
    with LocalServer(flags, log_path=log) as running:
        yield running


@pytest.fixture
def http(server: LocalServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, timeout=60) as client:
        yield client


def num_shed(http: httpx.Client) -> int:
    (replica,) = http.get("/coserve/status").raise_for_status().json()["replicas"]
    return int(replica["online"]["shed"])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", DOORS)
def test_a_refusal_is_a_503_with_retry_after(http: httpx.Client, path: str, streams: bool) -> None:
    before = num_shed(http)
    body = DOORS[path] | {"stream": streams}
    refused = http.post(path, json=body | LATE)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert "overloaded" in refused.text
    assert num_shed(http) == before + 1
    served = http.post(path, json=body)
    assert served.status_code == 200
    assert "retry-after" not in served.headers
    assert ("data:" in served.text) == streams
    assert num_shed(http) == before + 1
