"""One real server takes the whole corpus, online and as lines, and is as it was afterwards."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx2
import orjson
import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from chaos_bench.vision_model import make_vision_model
from sglang_coserve.local_server import LocalServer
from srt.hostile.requests import CHAT, COMPLETIONS, GENERATE, HostileRequest, corpus
from started_processes import engine_processes

ANSWER_TIMEOUT_S = 120
"""For one answer among many, on a machine that has other things to do. A stall has no end."""

NUM_CLIENTS = 6
ORDINARY = {
    "text": "The ferry left the harbour before the rain.",
    "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
}


SERVERS = [
    pytest.param((1, False, "0"), id="msgpack", marks=pytest.mark.heavy),
    pytest.param((1, True, "1"), id="multimodal"),
    pytest.param((2, False, "1"), id="tp2", marks=pytest.mark.heavy),
]
"""Ranks, whether the model takes pictures, and whether SGLang pickles its messages."""


@pytest.fixture(scope="module", params=SERVERS)
def server(
    request: pytest.FixtureRequest, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalServer]:
    directory = tmp_path_factory.mktemp("hostile")
    num_ranks, is_multimodal, pickles = request.param
    model = make_vision_model(directory / "model") if is_multimodal else small_model
    flags = ["--model-path", str(model), "--dtype", "float32", "--log-level", "error"]
    flags += ["--startup-profile-seconds", "1", "--coserve-data-dir", str(directory / "data")]
    flags += ["--max-total-tokens", "8192", "--chunked-prefill-size", "128"]
    flags += ["--tp-size", str(num_ranks), "--served-model-name", "small"]
    # One thread: of a model this small, more only wait for each other where cores are busy.
    environment = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "OMP_NUM_THREADS": "1"}
    environment["SGLANG_USE_PICKLE_IPC"] = pickles
    log = directory / "server.log"
    with LocalServer(flags, log_path=log, extra_env=environment) as running:
        yield running


@pytest.fixture
def http(server: LocalServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.base_url, timeout=ANSWER_TIMEOUT_S) as client:
        yield client


def ordinary_text(http: httpx2.Client) -> str:
    answer: dict[str, Any] = http.post(GENERATE, json=ORDINARY).raise_for_status().json()
    return str(answer["text"])


def memory_mib(server: LocalServer) -> float:
    """Return the most memory that the server's own process has had."""
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{server.pid}/status").read_text())
    return int(line) / 1024


def assert_nothing_left(http: httpx2.Client) -> None:
    """No request anywhere, and by the engine's own account no memory in use."""
    http.post("/flush_cache", params={"timeout": 60}).raise_for_status()
    (replica,) = http.get("/coserve/status").raise_for_status().json()["replicas"]
    assert (replica["online"]["waiting"], replica["online"]["running"]) == (0, 0)
    assert (replica["offline"]["waiting"], replica["offline"]["running"]) == (0, 0)


def test_every_request_is_answered_and_harms_no_other(
    server: LocalServer, http: httpx2.Client
) -> None:
    expected = ordinary_text(http)
    processes = engine_processes(server)
    assert len(processes) >= 2
    is_over = Event()
    ordinary: list[str] = []

    def serve_others() -> None:
        with httpx2.Client(base_url=server.base_url, timeout=ANSWER_TIMEOUT_S) as client:
            while not is_over.wait(0.05):
                ordinary.append(ordinary_text(client))

    def status_of(request: HostileRequest) -> tuple[str, int | str]:
        headers = {"content-type": "application/json", **dict(request.headers)}
        try:
            answer = http.post(request.path, content=request.content, headers=headers)
        except httpx2.HTTPError as error:
            return request.name, repr(error)
        return request.name, answer.status_code

    memory_before = memory_mib(server)
    with ThreadPoolExecutor(NUM_CLIENTS + 1) as clients:
        others = clients.submit(serve_others)
        try:
            answers = list(clients.map(status_of, corpus()))
        finally:
            is_over.set()
        others.result()
    wrong = [(name, status) for name, status in answers if status not in WELL_ANSWERED]
    assert wrong == []
    # Twenty pictures of 21 KiB would take 25 GiB.
    assert memory_mib(server) - memory_before < 4096
    assert set(ordinary) == {expected}
    assert ordinary_text(http) == expected
    assert engine_processes(server) == processes
    assert_nothing_left(http)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("received_time", 1.0),
        ("token_indices_to_pool", [100_000]),
        ("token_indices_to_pool", []),
        ("custom_labels", {"tenant": "x"}),
        ("log_metrics", False),
        ("background", True),
        ("input_embeds", [[0.5] * 3] * 40),
    ],
)
def test_a_client_cannot_set_what_the_server_sets(
    http: httpx2.Client, field: str, value: Any
) -> None:
    if field not in GenerateReqInput.__dataclass_fields__:
        pytest.skip("this version of SGLang does not have the field")
    fields = {"sampling_params": {"max_new_tokens": 0}, field: value}
    text = {} if field == "input_embeds" else {"text": "Hello there"}
    answer = http.post(GENERATE, json={**text, **fields})
    assert answer.status_code == 400
    assert f"{field} is " in answer.json()["error"]["message"]
    instance = {field: value} if field == "input_embeds" else text
    parameters = {"sampling_params": {}} if field == "input_embeds" else fields
    vertex = {"instances": [instance], "parameters": parameters}
    answer = http.post("/vertex_generate", json=vertex)
    assert answer.status_code in (400, 404)  # An operator may close the route.
    assert ordinary_text(http)


WELL_ANSWERED = {200, *range(400, 500)}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_every_line_has_a_record_and_harms_no_other(
    server: LocalServer, http: httpx2.Client, path: str
) -> None:
    expected = ordinary_text(http)
    processes = engine_processes(server)
    content = b"".join(hostile_lines(path))
    num_lines = content.count(b"\n")
    assert num_lines > 200
    upload = http.post(
        "/v1/files", files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"}
    )
    file_id = upload.raise_for_status().json()["id"]
    body = {"input_file_id": file_id, "endpoint": path, "completion_window": "24h"}
    batch = http.post("/v1/batches", json=body).raise_for_status().json()
    give_up_s = time.monotonic() + 300
    while batch["status"] not in ("completed", "failed", "expired"):
        assert time.monotonic() < give_up_s, batch
        time.sleep(0.2)
        batch = http.get(f"/v1/batches/{batch['id']}").raise_for_status().json()
    assert batch["status"] == "completed", batch["errors"]
    counts = batch["request_counts"]
    assert counts["completed"] + counts["failed"] == counts["total"] == num_lines
    assert counts["completed"] > 0
    errors = http.get(f"/v1/files/{batch['error_file_id']}/content").raise_for_status()
    for line in errors.text.splitlines():
        record = json.loads(line)
        assert 400 <= record["response"]["status_code"] < 500, record
    assert ordinary_text(http) == expected
    assert engine_processes(server) == processes
    assert_nothing_left(http)


def hostile_lines(path: str) -> Iterator[bytes]:
    """The requests to ``path`` whose body a line can have at all."""
    for number, request in enumerate(corpus()):
        if request.path != path:
            continue
        try:
            body = orjson.loads(request.content)
        except orjson.JSONDecodeError:
            continue
        if isinstance(body, dict) and body.get("stream") is None:
            head = f'{{"custom_id": "{number}", "method": "POST", "url": "{path}", "body": '
            yield head.encode() + request.content + b"}\n"
