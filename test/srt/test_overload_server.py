"""Overload over HTTP: what can no longer make it gets a 503 that says when to come back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
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


@pytest.mark.parametrize("streams", [False, True])
def test_the_official_client_sees_the_error(server: LocalServer, streams: bool) -> None:
    url = f"{server.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        with pytest.raises(openai.InternalServerError) as refused:
            client.chat.completions.create(
                model="default", messages=MESSAGES, max_tokens=2, stream=streams, extra_body=LATE
            )
        assert refused.value.status_code == 503
        assert refused.value.response.headers["retry-after"] == "1"


def test_in_a_burst_everything_else_is_answered(http: httpx.Client) -> None:
    """Streams and others at once, a third of them late."""
    before = num_shed(http)

    def send(number: int) -> int:
        body = DOORS["/v1/chat/completions"] | {"stream": number % 2 == 0}
        late = LATE if number % 3 == 0 else {}
        return http.post("/v1/chat/completions", json=body | late).status_code

    with ThreadPoolExecutor(12) as threads:
        codes = list(threads.map(send, range(36)))
    assert codes == [503 if number % 3 == 0 else 200 for number in range(36)]
    assert num_shed(http) == before + 12


def test_prometheus_counts_refusals(http: httpx.Client) -> None:
    http.post("/generate", json=DOORS["/generate"] | LATE)
    lines = http.get("/metrics").raise_for_status().text.splitlines()
    assert any(line.startswith("coserve_online_shed_total{") for line in lines)
