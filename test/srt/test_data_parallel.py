"""Two replicas behind one server: marks, batches, status and metrics are of both."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from batch.route_calls import completed
from calls import get
from srt.batch_server.deployment import ADMIN_KEY, API_KEY, Deployment, create, lines
from waiting import eventually

FLAGS = (
    *("--dp-size", "2", "--enable-metrics", "--startup-profile-seconds", "0"),
    *("--max-total-tokens", "4096", "--slo-ttft-ms", "300", "--slo-tpot-ms", "100"),
)


@pytest.fixture(scope="module")
def deployment(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("replicas")
    with Deployment(small_model, directory, *FLAGS) as running:
        yield running


@pytest.fixture
def server(deployment: Deployment) -> Deployment:
    """The same server, started again where a test has ended it."""
    if deployment.has_ended:
        deployment.start()
    return deployment


def received(server: Deployment) -> list[int]:
    """How many offline requests each replica has had."""
    return [replica["offline"]["received"] for replica in server.status()["replicas"]]


def test_marks_are_known_to_every_replica_and_outputs_are_the_same(server: Deployment) -> None:
    before = received(server)
    assert len(before) == 2
    with server.client() as client:
        chats: list[Any] = [
            client.chat.completions.create(
                model="small",
                messages=[{"role": "user", "content": "Who repaired the boat?"}],
                max_tokens=12,
                temperature=0,
                service_tier=tier,
            )
            for tier in ("flex", "flex", "default", "default")
        ]
    assert [chat.service_tier for chat in chats] == ["flex", "flex", "default", "default"]
    assert len({chat.choices[0].message.content for chat in chats}) == 1
    # SGLang lets replicas take turns.
    assert [now - then for now, then in zip(received(server), before, strict=True)] == [1, 1]


def test_a_batch_runs_on_all_replicas(server: Deployment) -> None:
    before = received(server)
    with server.client() as client:
        found = completed(client, create(client, lines(16)).id)
    assert sorted(found) == sorted(f"id-{n}" for n in range(16))
    assert all(now > then for now, then in zip(received(server), before, strict=True))


def test_the_load_is_that_of_both(server: Deployment) -> None:
    load = get(server, "/coserve/load", ADMIN_KEY).json()
    assert (load["replicas"], load["kv_tokens"]) == (2, 2 * 4096)


def test_metrics_name_the_replica(server: Deployment) -> None:
    with server.client() as client:
        for _ in range(2):
            client.completions.create(model="small", prompt="The old mill", max_tokens=2)

    def exported() -> bool:
        metrics = get(server, "/metrics").text.splitlines()
        ours = [line for line in metrics if line.startswith("coserve_requests{")]
        return all(any(f'dp_rank="{rank}"' in line for line in ours) for rank in (0, 1))

    eventually(exported)


def test_the_server_expects_what_its_replicas_do_together(server: Deployment) -> None:
    answer = get(server, "/server_info", API_KEY)
    ours = answer.raise_for_status().json()["coserve"]
    assert ours["offline_policy"] == "coserve"
    key = "expected_offline_tokens_per_s"
    one = server.status()["replicas"][0][key]
    assert ours[key] > one > 0


def test_a_replica_that_dies_ends_the_server(server: Deployment) -> None:
    """SGLang's controller would go on, and send every second request to nobody."""
    schedulers = [
        child
        for child in psutil.Process(server.pid).children(recursive=True)
        if any("sglang::scheduler" in word for word in child.cmdline())
    ]
    assert len(schedulers) == 2
    os.kill(schedulers[1].pid, signal.SIGKILL)
    eventually(lambda: server.has_ended)
    server.stop()
