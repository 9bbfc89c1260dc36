"""A real engine that is taken out and let in again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

from batch.route_calls import completed, texts, until
from calls import exported
from http_lines.heard import Heard
from sglang_coserve.http_lines.http_engine import HttpEngine
from sglang_coserve.lines.backend import LineMovedError, LineRequest
from srt.batch_server.deployment import ADMIN_KEY, COMPLETIONS, Deployment, create, lines
from waiting import GIVE_UP_S, eventually

NUM_LINES, NUM_TOKENS = 5, 300
"""More lines than may run at once."""


def request(number: int, generated: Sequence[int] = ()) -> LineRequest:
    body: dict[str, Any] = {"model": "small", "temperature": 0, "ignore_eos": True}
    body |= {"prompt": f"The {number}th mill by the river", "max_tokens": NUM_TOKENS}
    return LineRequest("batch_1", number, COMPLETIONS, body, tuple(generated))


def drain(deployment: Deployment, method: str = "POST", query: str = "") -> dict[str, Any]:
    answer = deployment.ask(method, f"/coserve/drain{query}")
    return answer.raise_for_status().json()


def batches_exported(deployment: Deployment) -> dict[str, float]:
    """What ``/metrics`` says of batches by their state, and of the lines that wait."""
    samples = exported(deployment, "coserve_batch")
    return {sample.labels.get("state", sample.name): sample.value for sample in samples}


@pytest.fixture(autouse=True)
def lets_requests_in_again(deployment: Deployment) -> Iterator[None]:
    """Other tests use the server, too."""
    yield
    drain(deployment, "DELETE")


async def test_a_drained_engine_hands_lines_back_and_goes_on_after_their_tokens(
    deployment: Deployment,
) -> None:
    async with asyncio.timeout(GIVE_UP_S):
        async with HttpEngine(deployment.base_url, ADMIN_KEY) as connection:
            model = (await connection.report()).model
            numbers = range(NUM_LINES)
            heard: list[list[int]] = [[] for _ in numbers]
            with deployment.slowly():
                attempts = [
                    asyncio.ensure_future(connection.run(request(n), model, Heard(heard[n].extend)))
                    for n in numbers
                ]
                while sum(map(bool, heard)) < 2:
                    await asyncio.sleep(0.01)
                state = await asyncio.to_thread(drain, deployment, "POST", f"?wait_s={GIVE_UP_S}")
            assert state == {"is_draining": True, "lines": 0, "requests": 0}
            ended = await asyncio.gather(*attempts, return_exceptions=True)
            assert all(isinstance(end, LineMovedError) for end in ended), ended
            assert all("draining" in str(end) for end in ended)
            with pytest.raises(LineMovedError, match="draining"):
                await connection.run(request(0), model, Heard(heard[0].extend))

            assert await asyncio.to_thread(drain, deployment, "DELETE") == {
                "is_draining": False,
                "lines": 0,
                "requests": 0,
            }
            results = await asyncio.gather(
                *(connection.run(request(n, heard[n]), model, Heard()) for n in numbers)
            )
            whole = await asyncio.gather(
                *(connection.run(request(n), model, Heard()) for n in numbers)
            )
            assert [r.body["choices"] for r in results] == [r.body["choices"] for r in whole]


def test_its_background_tasks_are_shown(deployment: Deployment) -> None:
    status = deployment.status()
    tasks = status["background"]
    assert {"view_samples", "drain_at_stop", "metrics", "file_expiry"} <= tasks.keys()
    assert all(task["failures"] == 0 for task in tasks.values())
    assert all(task["running"] == 1 for name, task in tasks.items() if name != "batch")
    assert all(replica["background"] == {} for replica in status["replicas"])
    samples = exported(deployment, "coserve_background_failures")
    assert {one.labels["task"]: one.value for one in samples} == dict.fromkeys(tasks, 0.0)


def test_it_tells_routers_serves_who_comes_and_keeps_its_batches(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    batch = create(client, lines(6, 200))
    until(client, batch.id, "in_progress", some_done=True)
    assert drain(deployment)["is_draining"]
    try:
        assert drain(deployment)["is_draining"]
        assert drain(deployment, "GET")["is_draining"]
        assert deployment.ask("GET", "/coserve/load").json()["is_draining"]
        assert deployment.ask("GET", "/coserve/lines").json()["refuses"] == "draining"
        for path in ("/health", "/health_generate"):
            assert deployment.ask("GET", path).status_code == 503
        with pytest.raises(openai.InternalServerError, match="draining"):
            client.batches.retrieve(batch.id)
        answer = client.completions.create(model="small", prompt="hello", max_tokens=3)
        assert answer.usage.completion_tokens == 3
    finally:
        assert not drain(deployment, "DELETE")["is_draining"]
    assert not drain(deployment, "DELETE")["is_draining"]
    assert deployment.ask("GET", "/health").status_code == 200
    found = texts(completed(client, batch.id))
    assert len(found) == 6
    again = completed(client, create(client, lines(6, 200)).id)
    assert found == texts(again)


def test_its_batches_are_not_exported_by_who_does_not_serve_them(
    deployment: Deployment, client: openai.OpenAI
) -> None:
    with deployment.slowly():
        batch = create(client, lines(60, 40))
        path = f"/coserve/batches/{batch.id}"
        deployment.ask("POST", f"{path}/pause").raise_for_status()
    eventually(lambda: batches_exported(deployment)["paused"] == 1)
    assert drain(deployment)["is_draining"]
    try:
        assert set(batches_exported(deployment).values()) == {0}
    finally:
        drain(deployment, "DELETE")
    eventually(lambda: batches_exported(deployment)["paused"] == 1)
    client.batches.cancel(batch.id)
    until(client, batch.id, "cancelled")
