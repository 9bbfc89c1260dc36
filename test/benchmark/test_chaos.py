"""The chaos run, for a minute: the long one is ``benchmark/chaos.py``."""

from __future__ import annotations

import argparse
import errno
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import chaos
from chaos_bench.answers import CHAT, KnownAnswer, answered_text
from chaos_bench.batch_load import LineCounts
from chaos_bench.figures import Figure, Interval, Observation, markdown
from chaos_bench.rounds import hurt_in_rounds
from chaos_bench.torn_tails import DiskFaults
from chaos_bench.verdict import online_verdict, verdict
from chaos_bench.vision_model import random_picture

WRITER = """
import os, sys
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
os.write(file, b"synced ")
os.fsync(file)
os.write(file, b"and not")
open(os.environ["CHAOS_DISK"] + "/failing", "w").close()
try:
    os.fdatasync(file)
except OSError as error:
    print(error.errno)
"""
ZERO = (
    *("ends of the server that nobody asked for", "lines lost", "lines doubled"),
    *("lines different", "online answers different", "answers of 5xx"),
    "probes without an answer",
)


def test_a_sync_fails_and_what_was_not_synced_is_torn(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    torn = set()
    for number in range(20):
        faults = DiskFaults(data, tmp_path / f"notes-{number}", random.Random(number))
        command = [sys.executable, "-c", WRITER, str(data / "file")]
        environment = {**os.environ, **faults.environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == [str(errno.EIO)], done.stderr
        faults.tear()
        content = (data / "file").read_bytes()
        assert content.startswith(b"synced ")
        torn.add(content)
        (data / "file").unlink()
    assert b"synced and not" in torn  # The kernel had written it.
    assert any(len(each) < len(b"synced and not") for each in torn)
    assert any(each.endswith(b"\0") for each in torn)


def options(**values: object) -> argparse.Namespace:
    return argparse.Namespace(**{"seed": 1, "minutes": 0.0, "pause": (0.0, 0.0), **values})


def test_a_round_has_each_injury_once_though_the_time_is_over() -> None:
    names, done = ["a", "b", "c"], list[str]()

    def injure(name: str) -> bool:
        done.append(name)
        return True

    hurt_in_rounds(injure, names, options())
    assert sorted(done) == names


def test_what_cannot_be_done_now_is_tried_again() -> None:
    answers = [False, False, True]
    hurt_in_rounds(lambda _: answers.pop(0), ["a"], options())
    assert answers == []


def test_an_interrupt_ends_the_injuries_after_the_one_under_way() -> None:
    done: list[str] = []

    def injure(name: str) -> bool:
        signal.raise_signal(signal.SIGINT)
        done.append(name)
        return True

    hurt_in_rounds(injure, ["a", "b"], options(minutes=60.0))
    assert len(done) == 1


def test_a_request_with_a_picture_is_a_chat_and_one_without_a_completion() -> None:
    picture = random_picture(random.Random(1))
    chat = KnownAnswer("a mill", 5, "text", picture)
    (message,) = chat.body(stream=True)["messages"]
    assert chat.path == CHAT and "prompt" not in chat.body()
    assert message["content"][0]["image_url"] == {"url": picture}
    assert KnownAnswer("a mill", 5, "text").body()["prompt"] == "a mill"
    answers = [{"text": "a"}, {"message": {"content": "a"}}, {"delta": {"content": "a"}}]
    assert list(map(answered_text, answers)) == ["a"] * 3
    assert answered_text({"delta": {"role": "assistant", "content": None}}) == ""


def test_a_full_queue_is_an_ordinary_outcome_and_other_errors_are_none() -> None:
    refused = Observation(
        "stream", 1.0, 2.0, 503, detail='{"message": "The request queue is full."}'
    )
    failed = Observation("stream", 1.0, 2.0, 503, detail="the engine has ended")
    found = verdict(
        [refused, failed], LineCounts(), outages=[], full_disk=[], injuries=0, unexpected_ends=0
    )
    figures = {figure.name: figure.value for figure in found.figures}
    assert figures["requests refused by a full queue"] == 1
    assert figures["answers of 5xx"] == 1


def test_online_requests_fail_with_an_engine_only_as_it_is_killed() -> None:
    seen = [
        Observation("stream", 1.0, 5.5, 0),  # Broken off as the engine was killed.
        Observation("stream", 1.0, 9.0, 0),  # Long after.
        Observation("stream", 6.0, 7.0, 503),
        Observation("stream", 1.0, 5.0, 200, is_different=True),
        Observation("gap", 1.0, 5.0, 0),
    ]
    found = online_verdict(seen, [Interval(5.0, 5.2)])
    assert {figure.name: figure.value for figure in found.figures} == {
        "online requests": 4,
        "that failed with a killed engine": 1,
        "that failed otherwise": 2,
        "online answers different": 1,
    }


def test_a_figure_is_judged_and_its_table_says_how() -> None:
    figures = [
        Figure("delay", 250.0, "ms", at_most=300),
        Figure("lost", 3, at_most=0),
        Figure("size", 5_000, "MB"),
    ]
    assert [figure.is_met for figure in figures] == [True, False, None]
    assert markdown(figures).splitlines()[2:] == [
        "| delay | 250 ms | ≤ 300 | yes |",
        "| lost | 3 | ≤ 0 | **no** |",
        "| size | 5,000 MB |  |  |",
    ]


@pytest.mark.heavy
@pytest.mark.timeout(1200)  # Three starts of a server, on a machine with other work.
@pytest.mark.parametrize(
    "injuries",
    [
        (
            *("power failure", "kill -9 of the scheduler", "full disk"),
            *("abort of all requests", "two updates of the weights"),
        )
    ],
)
def test_nothing_is_lost_doubled_or_different(
    injuries: tuple[str, ...], small_model: Path, tmp_path: Path
) -> None:
    flags = (
        *("--minutes", "0", "--pause", "1", "4", "--model-path", str(small_model)),
        *("--known", "12", "--lines", "20", "--unfinished", "2", "--streams", "1"),
        *("--storms", "1", "--out", str(tmp_path), "--injuries", *injuries),
        *("--server-flag=--dtype", "--server-flag=float32"),
        *("--server-flag=--startup-profile-seconds", "--server-flag=0"),
        # Loose targets: what is asked here is whether lines are lost, not what they may cost.
        *("--server-flag=--slo-ttft-ms", "--server-flag=2000"),
        *("--server-flag=--slo-tpot-ms", "--server-flag=500"),
    )
    found = chaos.run(chaos.parse_options(flags))
    figures = {figure.name: figure.value for figure in found.figures}
    assert {name: figures[name] for name in ZERO} == dict.fromkeys(ZERO, 0), found.examples
    assert figures["injuries"] >= len(injuries)
    assert figures["online streams"] > 0
    assert figures["hostile requests"] > 0
