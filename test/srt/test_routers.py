"""Real routers in front of two real engines, one of them full of offline work.

``smg`` is installed with what tests need. ``sglang-router`` is not, since it has a command of that
name, too: name its own in ``COSERVE_SGLANG_ROUTER``, or have it on the ``PATH``.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from batch.scenarios import lines
from calls import call
from chaos_bench.router import COMMANDS, Router, router_command
from fleet.gateway_process import gateway
from sglang_coserve.client import CoserveClient
from sglang_coserve.local_server import LocalServer
from srt.test_load_report import full_of_offline_work
from waiting import GIVE_UP_S, eventually

pytestmark = pytest.mark.heavy

ADMIN_KEY = "admin secret"
POLL_S = 1
REQUESTS_PER_S = 5.0


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest) -> Path:
    path = router_command(request.param)
    if path is None:
        pytest.skip(f"{request.param} is not installed: name it in {COMMANDS[request.param]}")
    return path


@pytest.fixture(scope="module")
def engines(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Two of them, for all routers; started only where there is one."""
    if not any(map(router_command, COMMANDS)):
        pytest.skip("no router is installed")
    flags = [
        *("--model-path", str(small_model), "--dtype", "float32", "--enable-metrics"),
        *("--max-total-tokens", "4096", "--startup-profile-seconds", "1"),
    ]
    work = tmp_path_factory.mktemp("engines")
    servers = [
        LocalServer(
            [*flags, "--weight-version", name],
            log_path=work / f"{name}.log",
            extra_env={"OMP_NUM_THREADS": "1"},
        )
        for name in ("first", "second")
    ]
    with servers[0] as first, servers[1] as second:
        yield [first.base_url, second.base_url]


def test_a_router_does_not_keep_away_from_offline_work(
    command: Path, engines: list[str], tmp_path: Path
) -> None:
    """With the policy that goes by what engines report. By chance alone 60 requests would split
    as unevenly as 18 to 42 once in 500 runs."""
    rng = random.Random(3)
    prompts = [" ".join(f"w{rng.randrange(10**6)}" for _ in range(48)) for _ in range(60)]

    def answered_by(url: str, prompt: str) -> str:
        params = {"max_new_tokens": 16, "ignore_eos": True}
        body = {"text": prompt, "sampling_params": params}
        answer = httpx2.post(f"{url}/generate", json=body, timeout=GIVE_UP_S).raise_for_status()
        return str(answer.json()["meta_info"]["weight_version"])

    is_smg = command.name == "smg"
    flags = ("--load-monitor-interval", str(POLL_S)) if is_smg else ()
    log_path = tmp_path / "router.log"
    with (
        Router(command, "power_of_two", engines, log_path, *flags) as router,
        httpx2.Client(base_url=engines[0], timeout=GIVE_UP_S) as full,
        full_of_offline_work(full),
        ThreadPoolExecutor(len(prompts)) as clients,
    ):
        time.sleep(2 * POLL_S + 1)
        answers = []
        for prompt in prompts:
            answers.append(clients.submit(answered_by, router.base_url, prompt))
            time.sleep(rng.expovariate(REQUESTS_PER_S))
        by_engine = Counter(answer.result() for answer in answers)
    share = by_engine["first"] / by_engine.total()
    assert 0.3 < share < 0.7, by_engine


def test_a_clients_errors_open_no_breaker(
    command: Path, engines: list[str], tmp_path: Path
) -> None:
    """``sglang-router`` takes a client's errors for the engine's unless its breaker is off."""
    flags = () if command.name == "smg" else ("--disable-circuit-breaker",)
    log_path = tmp_path / "router.log"
    bad = {"text": "x", "sampling_params": {"max_new_tokens": 1, "top_p": 7}}
    good = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
    with (
        Router(command, "round_robin", engines, log_path, *flags) as router,
        httpx2.Client(base_url=router.base_url, timeout=60) as http,
    ):
        # Ten failures open one by default.
        answers = [http.post("/generate", json=bad).status_code for _ in range(30)]
        assert set(answers) == {400}
        versions = set()
        for _ in range(8):
            answer = http.post("/generate", json=good).raise_for_status().json()
            versions.add(answer["meta_info"]["weight_version"])
    assert versions == {"first", "second"}


@pytest.mark.timeout(1800)
def test_a_batch_goes_through_a_router_to_all_engines(
    command: Path, engines: list[str], tmp_path: Path
) -> None:
    """As offline requests with a deadline: each engine counts its own."""
    num_lines = int(os.environ.get("COSERVE_TEST_LINES", "200"))
    (tmp_path / "in.jsonl").write_bytes(lines(num_lines, model="default", max_tokens=4))
    before = [offline_requests(url) for url in engines]
    with (
        Router(command, "round_robin", engines, tmp_path / "router.log") as router,
        gateway(tmp_path, "--router", router.base_url) as served,
        CoserveClient(served.base_url) as client,
    ):
        job = client.submit_jsonl(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
        job.wait()
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").open()]
    assert len({record["custom_id"] for record in records}) == len(records) == num_lines
    assert all(record["response"]["status_code"] == 200 for record in records)
    counts = [offline_requests(url) - n for url, n in zip(engines, before, strict=True)]
    assert sum(counts) == num_lines
    assert min(counts) > num_lines / 4, counts


def offline_requests(url: str) -> float:
    """How many offline requests an engine has begun."""
    content = httpx2.get(f"{url}/metrics", timeout=60).raise_for_status().text
    families = text_string_to_metric_families(content)
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "coserve_queue_seconds_count"
        and sample.labels["request_class"] == "offline"
    )


def test_a_drained_engine_gets_no_requests_and_loses_none(
    command: Path, small_model: Path, tmp_path: Path
) -> None:
    """Two engines of its own, whose operator has a key."""
    flags = ["--model-path", str(small_model), "--dtype", "float32", "--admin-api-key", ADMIN_KEY]
    servers = [
        LocalServer(
            [*flags, "--startup-profile-seconds", "0", "--weight-version", name],
            log_path=tmp_path / f"{name}.log",
            extra_env={"OMP_NUM_THREADS": "1"},
        )
        for name in ("first", "second")
    ]
    checks = ("--health-check-interval-secs", "1")
    with servers[0] as first, servers[1] as second:
        urls = [first.base_url, second.base_url]
        with (
            Router(command, "round_robin", urls, tmp_path / "router.log", *checks) as router,
            httpx2.Client(base_url=router.base_url, timeout=60) as http,
        ):

            def versions() -> set[str]:
                body = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
                answers = [http.post("/generate", json=body).raise_for_status() for _ in range(6)]
                return {answer.json()["meta_info"]["weight_version"] for answer in answers}

            assert versions() == {"first", "second"}
            for method, wanted in (("POST", {"second"}), ("DELETE", {"first", "second"})):
                call(first, method, "/coserve/drain", ADMIN_KEY).raise_for_status()
                eventually(lambda wanted=wanted: versions() == wanted)
