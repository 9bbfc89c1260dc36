"""Weights that change under batches: across a kill -9, and while the server runs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from batch.route_calls import completed, texts, until
from sglang_coserve.small_model import SmallModelSpec, make_small_model
from srt.batch_server.deployment import Deployment, create, extra_of, lines
from waiting import eventually

CONTENT = lines(30, 100)
STEP_S = 0.02
"""The last lines end 18 s after the first ones, or later."""


@pytest.fixture(scope="module")
def models(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models that differ in nothing but the values of their weights."""
    spec = SmallModelSpec(hidden=64, layers=2, context=1024, seed=1)
    other = make_small_model(tmp_path_factory.mktemp("other"), spec)
    assert (other / "config.json").read_bytes() == (small_model / "config.json").read_bytes()
    return {"A": small_model, "B": other}


class Changing(Deployment):
    """A server whose model directory gets other weights."""

    def __init__(self, models: dict[str, Path], directory: Path) -> None:
        self._models = models
        self._place = directory / "model"
        shutil.copytree(models["A"], self._place)
        super().__init__(
            self._place,
            directory,
            *("--offline-max-running", "3", "--startup-profile-seconds", "0"),
        )

    def put(self, name: str) -> None:
        """Replace the files, as a deployment of new weights does; a running server keeps its."""
        for file in self._models[name].iterdir():
            new = self._place / f"{file.name}.new"
            shutil.copy(file, new)
            new.replace(self._place / file.name)

    def load(self, name: str, **how: Any) -> None:
        """Have the running server load other weights from the disk."""
        self.post("/update_weights_from_disk", model_path=str(self._models[name]), **how)

    def post(self, path: str, **body: Any) -> None:
        self.ask("POST", path, body=body).raise_for_status()


@pytest.fixture(scope="module")
def server(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Changing]:
    with Changing(models, tmp_path_factory.mktemp("changing")) as server:
        yield server


@pytest.fixture(scope="module")
def expected(server: Changing) -> Iterator[dict[str, dict[str, str]]]:
    """What each model answers to ``CONTENT``; the server has A's weights then."""
    answers = {}
    with server.client() as client:
        for name in ("B", "A"):
            server.load(name)
            answers[name] = texts(completed(client, create(client, CONTENT).id))
    assert not answers["A"].items() & answers["B"].items()
    yield answers


def whose(answers: dict[str, str], expected: dict[str, dict[str, str]]) -> dict[str, int]:
    """How many answers are of which model; fails when one is of neither."""
    counts = dict.fromkeys(expected, 0)
    for custom_id, text in answers.items():
        (name,) = [name for name in expected if expected[name][custom_id] == text]
        counts[name] += 1
    return counts


def half_done(server: Changing, client: openai.OpenAI) -> str:
    """A batch with some lines answered, and tokens of others in the journal."""
    batch = until(client, create(client, CONTENT).id, "in_progress", some_done=True)
    journal = server.data / "journal" / batch.id
    eventually(lambda: journal.exists() and journal.stat().st_size > 100)
    return str(batch.id)


def test_other_weights_after_a_kill_begin_half_done_lines_anew(
    server: Changing, expected: dict[str, dict[str, str]]
) -> None:
    server.stop()
    server.start()  # What was loaded since the start has another name at every start.
    with server.client() as client, server.slowly(STEP_S):
        batch_id = half_done(server, client)
        server.kill()
    server.put("B")
    server.start()
    try:
        with server.client() as client:
            answers = texts(completed(client, batch_id))
            counts = whose(answers, expected)
            assert counts["A"] > 0 < counts["B"]
            warning = extra_of(client.batches.retrieve(batch_id))["warning"]
            assert f"since {counts['A']} of the lines" in warning
        log = server.log.read_text()
        assert "half-done lines start over" in log
        assert f"since {counts['A']} of the lines" in log
    finally:
        server.stop()
        server.put("A")
        server.start()
    with server.client() as client:
        assert extra_of(client.batches.retrieve(batch_id))["warning"] == warning


@pytest.mark.parametrize("how", ["wait", "abort", "in_place", "pause and abort"])
def test_no_answer_is_of_two_models_when_weights_are_exchanged(
    server: Changing, expected: dict[str, dict[str, str]], how: str
) -> None:
    server.load("A")
    with server.client() as client:
        with server.slowly(STEP_S):
            batch_id = half_done(server, client)
            mode = {"in_place": "in_place", "pause and abort": "abort"}.get(how)
            if mode:
                server.post("/pause_generation", mode=mode)
            server.load("B", abort_all_requests=how == "abort", flush_cache=how != "in_place")
            if mode:
                server.post("/continue_generation")
        counts = whose(texts(completed(client, batch_id)), expected)
        assert counts["A"] > 0 < counts["B"]
        batch = client.batches.retrieve(batch_id)
        assert f"since {counts['A']} of the lines" in extra_of(batch)["warning"]
        assert server.status()["batch_api"]["line_retries"] == 0


@pytest.mark.skipif(version("sglang") == "0.5.17", reason="it has no sessions of weight updates")
def test_lines_wait_outside_of_the_engine_during_a_session_of_weight_updates(
    server: Changing, expected: dict[str, dict[str, str]]
) -> None:
    with server.client() as client:
        server.load("A")
        with server.slowly(STEP_S):
            batch_id = half_done(server, client)
            server.post("/begin_weight_update")  # Answers once the engine is idle.
        seen = []
        for _ in range(2):
            time.sleep(1)  # What had ended before is written in the first one.
            seen.append(client.batches.retrieve(batch_id).request_counts.completed)
        assert seen[0] == seen[1] < len(expected["A"])
        # Refused, as there is one. The lines go on waiting.
        with pytest.raises(httpx2.HTTPStatusError):
            server.post("/begin_weight_update")
        assert client.batches.retrieve(batch_id).status == "in_progress"
        server.post("/end_weight_update")
        assert texts(completed(client, batch_id)) == expected["A"]
        with pytest.raises(httpx2.HTTPStatusError):
            server.post("/end_weight_update")
        assert texts(completed(client, create(client, CONTENT).id)) == expected["A"]
