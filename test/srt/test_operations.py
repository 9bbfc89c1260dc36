"""What stands around a server expects of it: probes, logs, old proxies, refusals."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from sglang_coserve.local_server import LocalServer
from srt.test_server import DOORS, NOT_STREAMED
from started_processes import engine_processes
from waiting import GIVE_UP_S, eventually

BODY = {"model": "m", "prompt": "An old mill", "max_tokens": 4}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("operations")


@pytest.fixture(scope="module")
def server(small_model: Path, directory: Path) -> Iterator[LocalServer]:
    flags = [
        *("--model-path", str(small_model), "--dtype", "float32", "--served-model-name", "m"),
        *("--coserve-data-dir", str(directory / "data"), "--log-format", "json"),
        *("--startup-profile-seconds", "0", "--overload", "shed", "--slo-ttft-ms", "60000"),
    ]
    with LocalServer(flags, log_path=directory / "server.log") as server:
        yield server


def raw(server: LocalServer, *sent: bytes) -> bytes:
    """What the server answers on a connection of its own, which it closes."""
    port = int(server.base_url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=GIVE_UP_S) as connection:
        for piece in sent:
            connection.sendall(piece)
        received = b""
        while piece := connection.recv(1 << 16):
            received += piece
    return received


def test_health_is_that_of_the_schedulers(server: LocalServer) -> None:
    (scheduler,) = engine_processes(server, "scheduler")

    def status() -> int:
        return httpx2.get(f"{server.base_url}/health", timeout=GIVE_UP_S).status_code

    assert status() == 200
    os.kill(scheduler.pid, signal.SIGSTOP)
    try:
        eventually(lambda: status() == 503)
        assert (
            "have not answered"
            in httpx2.get(f"{server.base_url}/health").json()["error"]["message"]
        )
    finally:
        os.kill(scheduler.pid, signal.SIGCONT)
    eventually(lambda: status() == 200)


def test_an_id_goes_through_answer_and_log(server: LocalServer, directory: Path) -> None:
    url = f"{server.base_url}/v1/completions"
    answer = httpx2.post(url, json=BODY, headers={"x-request-id": "seen-7"}, timeout=GIVE_UP_S)
    assert answer.headers.get_list("x-request-id") == ["seen-7"]
    assert httpx2.post(url, json=BODY, timeout=GIVE_UP_S).headers["x-request-id"]

    def records() -> list[dict[str, object]]:
        lines = (directory / "server.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    # SGLang's own access log.
    eventually(lambda: any(r.get("request_id") == "seen-7" for r in records()))
    assert {r["process"] for r in records()} > {server.pid}


def test_old_proxies_and_careful_clients_are_served(server: LocalServer) -> None:
    body = json.dumps(BODY).encode()
    stream = json.dumps({**BODY, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/%s\r\nhost: x\r\ncontent-type: application/json\r\n"
    for content in (body, stream):
        length = b"content-length: %d\r\n" % len(content)
        answer = raw(server, head % b"1.0" + length + b"\r\n" + content)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"transfer-encoding" not in answer.lower()
        assert b'"text"' in answer
    length = b"content-length: %d\r\n" % len(body)
    expect = b"expect: 100-continue\r\nconnection: close\r\n\r\n"
    answer = raw(server, head % b"1.1" + length + expect, body)
    assert answer.startswith(b"HTTP/1.1 100") and b"HTTP/1.1 200" in answer


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", sorted(DOORS.keys() - NOT_STREAMED))
def test_under_overload_a_refusal_is_a_503_with_retry_after(
    server: LocalServer, path: str, streams: bool
) -> None:
    def num_shed() -> int:
        (replica,) = httpx2.get(f"{server.base_url}/coserve/status").json()["replicas"]
        return int(replica["online"]["shed"])

    before = num_shed()
    body = DOORS[path] | {"stream": streams}
    late = body | {"coserve_slo_ttft_ms": 0.001}  # Nobody can meet it.
    refused = httpx2.post(f"{server.base_url}{path}", json=late, timeout=GIVE_UP_S)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert "overloaded" in refused.text
    if path == "/v1/messages":
        assert refused.json()["error"]["type"] == "overloaded_error"
    assert (after := num_shed()) > before
    served = httpx2.post(f"{server.base_url}{path}", json=body, timeout=GIVE_UP_S)
    assert served.status_code == 200
    assert "retry-after" not in served.headers
    assert (served.headers["content-type"].split(";")[0] != "application/json") == streams
    assert num_shed() == after
