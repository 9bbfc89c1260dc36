"""The chaos run, for a minute: the long one is ``benchmark/chaos.py``."""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import chaos
from chaos import hurt_in_rounds
from chaos_bench.answers import CHAT, KnownAnswer, answered_text
from chaos_bench.figures import Figure, Interval, Observation, markdown
from chaos_bench.router import router_command
from chaos_bench.torn_tails import DiskFaults
from chaos_bench.verdict import Verdict, of_requests
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
    *("ends of a server that nobody asked for", "lines lost", "lines doubled"),
    *("servers that did not end or start as they should", "lines different"),
    *("that failed otherwise", "online answers different", "answers of 5xx"),
    "probes without an answer",
)
FLAGS = (
    *("--minutes", "0", "--unfinished", "2"),
    *("--server-flag=--dtype", "--server-flag=float32"),
    *("--server-flag=--startup-profile-seconds", "--server-flag=0"),
)
SMG = router_command("smg")


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


def values(found: Verdict) -> dict[str, float]:
    return {figure.name: figure.value for figure in found.figures}


def test_a_full_queue_is_an_ordinary_outcome_and_other_errors_are_none() -> None:
    refused = Observation(
        "stream", 1.0, 2.0, 503, detail='{"message": "The request queue is full."}'
    )
    failed = Observation("stream", 1.0, 2.0, 503, detail="the engine has ended")
    full = Observation("batch", 1.0, 2.0, 507)
    figures = values(of_requests([refused, failed, full], [], [Interval(0.0, 3.0)]))
    assert figures["requests refused by a full queue"] == 1
    assert figures["answers of 5xx"] == figures["that failed otherwise"] == 1
    assert values(of_requests([full], []))["answers of 5xx"] == 1


def test_an_outage_excuses_only_what_ended_with_it() -> None:
    seen = [
        Observation("stream", 1.0, 5.5, 0),  # Broken off as the engine was killed.
        Observation("stream", 1.0, 9.0, 0),  # Long after.
        Observation("stream", 6.0, 7.0, 503),
        Observation("stream", 1.0, 5.0, 200, is_different=True),
        Observation("gap", 1.0, 5.0, 0),
        Observation("ping", 4.0, 5.1, 0),
        Observation("ping", 8.0, 8.1, 0),
    ]
    figures = values(of_requests(seen, [Interval(5.0, 5.2)]))
    assert figures["online requests"] == 4
    assert figures["that failed in an outage"] == 1
    assert figures["that failed otherwise"] == 2
    assert figures["online answers different"] == 1
    assert figures["probes without an answer"] == 1
    assert figures["longest ping"] == pytest.approx(100.0)


def test_the_slowest_ping_tells_how_long_event_loops_waited_for_a_cpu() -> None:
    seen = [
        Observation("ping", 1.0, 1.5, 200, detail="waited", cpu_wait_ms=450.0),
        Observation("ping", 2.0, 2.2, 200, detail="ran", cpu_wait_ms=10.0),
    ]
    found = of_requests(seen, [])
    assert values(found)["longest ping"] == pytest.approx(500.0)
    assert values(found)["longest ping without waits for a CPU"] == pytest.approx(190.0)
    assert found.examples == ["ping of 500 ms: waited", "ping of 200 ms: ran"]


def test_an_outage_of_the_gateway_excuses_calls_of_the_batch_api_alone() -> None:
    seen = [
        Observation("batch", 1.0, 1.1, 503, detail="the gateway is starting"),
        Observation("batch", 4.0, 4.1, 503, detail="the gateway is starting"),
        Observation("stream", 1.0, 1.1, 503),
    ]
    figures = values(of_requests(seen, [], gateway_outages=[Interval(0.5, 2.0)]))
    assert figures["answers of 5xx"] == 2
    assert figures["that failed otherwise"] == 1


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


def hurt(out: Path, model: Path, *flags: str) -> dict[str, float]:
    """Return the figures of a run in which nothing was lost, doubled or different."""
    command = ["--out", str(out), "--model-path", str(model), *FLAGS, *flags]
    found = chaos.run(chaos.parse_options(command))
    figures = values(found)
    assert {name: figures[name] for name in ZERO} == dict.fromkeys(ZERO, 0), found.examples
    return figures


@pytest.mark.heavy
@pytest.mark.timeout(1200)  # Three starts of a server, on a machine with other work.
def test_a_server_loses_doubles_and_changes_nothing(small_model: Path, tmp_path: Path) -> None:
    injuries = (
        *("power failure", "kill -9 of the scheduler", "full disk"),
        *("abort of all requests", "two updates of the weights"),
    )
    figures = hurt(
        tmp_path,
        small_model,
        *("--known", "12", "--lines", "20", "--streams", "1", "--storms", "1"),
        *("--pause", "1", "4", "--injuries", *injuries),
        # Loose targets: what is asked here is whether lines are lost, not what they may cost.
        *("--server-flag=--slo-ttft-ms", "--server-flag=2000"),
        *("--server-flag=--slo-tpot-ms", "--server-flag=500"),
    )
    assert figures["injuries"] >= len(injuries)
    assert figures["online requests"] > 0
    assert figures["hostile requests"] > 0


@pytest.mark.heavy
def test_a_fleet_loses_doubles_and_changes_nothing(small_model: Path, tmp_path: Path) -> None:
    """Two real engines, behind a router where there is one; the one that is killed is not waited
    for.
    """
    kinds = ("kill -9 of an engine", "kill -9 of the gateway")
    figures = hurt(
        tmp_path,
        small_model,
        *("--engines", "2", *(("--router", str(SMG)) if SMG else ())),
        *("--known", "8", "--lines", "30", "--pause", "1", "2", "--injuries", *kinds),
    )
    assert figures["lines given up"] == 0
    assert [figures[kind] for kind in kinds] == [1, 1]
    assert figures["lines"] >= 30
    assert (figures["online requests"] > 0) == (SMG is not None)
    assert (tmp_path / "table.md").exists()
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["command"] and "commit" in results["machine"]
