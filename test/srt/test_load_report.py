"""The load of a real server, full of offline work and with online requests beside it.

``/coserve/load`` and ``coserve_*`` tell of both classes, SGLang's own names of what online
requests find.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from sglang_coserve.http_lines.engine_load import EngineLoad
from sglang_coserve.json_documents import read_json
from sglang_coserve.local_server import LocalServer
from waiting import GIVE_UP_S, eventually

KV_TOKENS = 2048
NUM_OFFLINE = 24
OFFLINE_TOKENS = 300


@pytest.fixture(scope="module")
def http(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    flags = [
        *("--model-path", str(small_model), "--dtype", "float32", "--served-model-name", "m"),
        *("--max-total-tokens", str(KV_TOKENS), "--startup-profile-seconds", "1"),
        "--enable-metrics",
    ]
    log_path = tmp_path_factory.mktemp("load") / "server.log"
    with (
        LocalServer(flags, log_path=log_path) as server,
        httpx2.Client(base_url=server.base_url, timeout=GIVE_UP_S) as client,
    ):
        yield client


def load_of(http: httpx2.Client) -> EngineLoad:
    return read_json(EngineLoad, http.get("/coserve/load").raise_for_status().text, "load")


def sglangs_load(http: httpx2.Client) -> dict[str, float]:
    (load,) = http.get("/v1/loads").raise_for_status().json()["loads"]
    return load


def gauge(http: httpx2.Client, name: str) -> float:
    """Return a metric that has one value; ``name`` may have a label, as it is written."""
    lines = http.get("/metrics/").raise_for_status().text.splitlines()
    (value,) = {
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(name.partition("{")[0] + "{") and name.partition("{")[2] in line
    }
    return value


def until(http: httpx2.Client, holds: Callable[[EngineLoad], bool]) -> EngineLoad:
    def look() -> EngineLoad | None:
        return load if holds(load := load_of(http)) else None

    return eventually(look)


@contextmanager
def full_of_offline_work(http: httpx2.Client) -> Iterator[None]:
    """Within it, offline requests hold and wait for memory."""
    ends = threading.Event()

    def send(number: int) -> None:
        body = {
            "text": f"Line {number} of the old mill",
            "sampling_params": {
                "max_new_tokens": OFFLINE_TOKENS,
                "ignore_eos": True,
                "custom_params": {"coserve_class": "offline"},
            },
        }
        while not ends.is_set():
            http.post("/generate", json=body).raise_for_status()

    threads = [threading.Thread(target=send, args=(n,)) for n in range(NUM_OFFLINE)]
    for thread in threads:
        thread.start()
    try:
        until(http, lambda load: load.offline.running > 1 and load.offline.waiting > 1)
        yield
    finally:
        ends.set()
        http.post("/abort_request", json={"abort_all": True}).raise_for_status()
        for thread in threads:
            thread.join(GIVE_UP_S)
            assert not thread.is_alive()


def test_an_idle_engine_says_what_it_is_and_what_fits(http: httpx2.Client) -> None:
    load = until(http, lambda load: not load.offline.running)
    assert load.replicas == 1
    assert not load.is_draining
    assert load.model_name == "m"
    assert load.kv_tokens == KV_TOKENS
    assert load.online_kv_tokens == 0
    assert load.online.outstanding_tokens == load.offline.outstanding_tokens == 0
    assert load.reclaim_s == 0
    assert load.headroom_tokens_per_s > 0
    assert 0 < load.max_lines <= KV_TOKENS
    assert load.kv_format.dtype == "float32"
    assert len(load.kv_fingerprint) == 32
    assert load.age_s < GIVE_UP_S


def test_offline_work_gives_way_and_online_work_does_not(http: httpx2.Client) -> None:
    with full_of_offline_work(http):
        full = until(http, lambda load: load.reclaimable_kv_tokens > KV_TOKENS // 4)
        assert (full.online.running, full.online.waiting) == (0, 0)
        assert full.online_kv_tokens == 0
        assert 0 < full.offline.outstanding_tokens < NUM_OFFLINE * (OFFLINE_TOKENS + 64)
        assert full.reclaim_s > 0
        # By the length of those that are there.
        assert full.max_lines <= KV_TOKENS // OFFLINE_TOKENS
        found = sglangs_load(http)
        assert (found["num_running_reqs"], found["num_waiting_reqs"]) == (0, 0)
        assert (found["num_used_tokens"], found["token_usage"]) == (0, 0)
        assert (found["num_total_tokens"], found["num_waiting_uncached_tokens"]) == (0, 0)
        for name in ("num_running_reqs", "num_queue_reqs", "token_usage", "kv_used_tokens"):
            assert gauge(http, f"sglang:{name}") == 0
        # Published once a second.
        eventually(lambda: gauge(http, 'coserve_kv_tokens{state="reclaimable"') > 0)
        body = {
            "text": "Who repaired the boat?",
            "sampling_params": {"max_new_tokens": 500, "ignore_eos": True},
        }
        sender = threading.Thread(target=lambda: http.post("/generate", json=body))
        sender.start()
        # What SGLang prefills runs, for it, from the next step on.
        until(http, lambda _load: sglangs_load(http)["num_running_reqs"] == 1)
        beside = load_of(http)
        assert 0 < beside.online_kv_tokens <= 520
        assert 0 < beside.online.outstanding_tokens <= 520
        found = sglangs_load(http)
        assert found["num_running_reqs"] == 1
        assert 0 < found["num_used_tokens"] <= 520
        assert found["token_usage"] == pytest.approx(found["num_used_tokens"] / KV_TOKENS, abs=1e-3)
        assert beside.online_kv_tokens + beside.reclaimable_kv_tokens <= KV_TOKENS
        sender.join(GIVE_UP_S)
    after = until(http, lambda load: not load.offline.running and not load.online.running)
    assert after.offline.outstanding_tokens == after.online.outstanding_tokens == 0
