"""A line of which the real engine dies, and a supervisor that starts the server again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from batch.route_calls import completed, texts, until
from sglang_coserve.errors import StartupError
from sglang_coserve.lines.engine_lines import InFlightFile
from srt.batch_server.deployment import Deployment, create, line, lines
from waiting import GIVE_UP_S, eventually

INNOCENTS = lines(10, 60)
LONG = lines(4, 300)
POISON = "poison"


@pytest.fixture(scope="module")
def mortal(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A server whose lines may bring code along: that of the poison line ends the scheduler."""
    flags = ("--enable-custom-logit-processor", "--startup-profile-seconds", "0")
    with pytest.MonkeyPatch.context() as environment:
        # SGLang would wait a minute for dumps of the GPU before it ends.
        environment.setenv("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")
        with Deployment(small_model, tmp_path_factory.mktemp("mortal"), *flags) as deployment:
            yield deployment


DEADLY = """
class Deadly(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        import os

        os._exit(7)
"""


def poison() -> bytes:
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    # Of no module that the server would have to import, which refuses a line for that.
    names = {"CustomLogitProcessor": CustomLogitProcessor, "__name__": "__main__"}
    exec(DEADLY, names)
    processor: Any = names["Deadly"]
    return line(POISON, 60, custom_logit_processor=processor.to_str()).encode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_that_reaches_all_processes_suspects_no_line(
    mortal: Deployment, number: signal.Signals
) -> None:
    """As a service manager or a terminal stops them: children may end before their parent."""
    with mortal.client() as client:
        with mortal.slowly():
            batch = create(client, LONG)
            until(client, batch.id, "in_progress")
            eventually(lambda: mortal.status()["batch_api"]["lines_in_flight"] == 4)
            os.killpg(mortal.pid, number)
        assert mortal.wait(GIVE_UP_S) is not None
        mortal.stop()
        file = InFlightFile(mortal.data / "in_flight", mortal.data / "fatal_signal")
        last_run = file.last_run()
        assert not last_run.engine_died
        mortal.start()
        assert "the engine ended by itself" not in mortal.log.read_text()
        assert len(completed(client, batch.id)) == 4


def start_until_it_stays_up(deployment: Deployment, batch_id: str) -> int:
    """Start the server as often as a supervisor would; return how often it has died."""

    def is_over() -> bool:
        with suppress(openai.APIConnectionError):
            return deployment.has_ended or client.batches.retrieve(batch_id).status == "completed"
        return False

    with deployment.client() as client:
        for deaths in range(5):
            eventually(is_over)
            if not deployment.has_ended:
                return deaths
            deployment.stop()
            with suppress(StartupError):  # It died before it was ready.
                deployment.start()
    raise AssertionError("it dies again and again")


def test_a_line_that_ends_the_engine_is_given_up_after_two_deaths(mortal: Deployment) -> None:
    with mortal.client() as client:
        expected = completed(client, create(client, INNOCENTS).id)
        with mortal.slowly():
            other = create(client, LONG)
            until(client, other.id, "in_progress")
            batch = create(client, INNOCENTS + poison())
    assert start_until_it_stays_up(mortal, batch.id) == 2
    with mortal.client() as client:
        found = completed(client, batch.id)
        given_up = found.pop(POISON)
        assert given_up["response"] is None
        assert given_up["error"]["code"] == "engine_failed"
        assert texts(found) == texts(expected)
        assert len(completed(client, other.id)) == 4
        again = completed(client, create(client, LONG).id)
        assert texts(again) == texts(completed(client, other.id))
