"""The chaos run, for a minute: the long one is ``benchmark/chaos.py``."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import chaos
from chaos_bench.torn_tails import DiskFaults
from common.figures import Figure

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


@pytest.mark.timeout(1200)  # Six starts of a server, on a machine with other work.
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
        *("--minutes", "0.3", "--pause", "2", "6", "--model-path", str(small_model)),
        *("--known", "12", "--lines", "20", "--unfinished", "2", "--streams", "1"),
        *("--storms", "1", "--out", str(tmp_path), "--in-turn", "--injuries", *injuries),
        *("--server-flag=--dtype", "--server-flag=float32"),
        *("--server-flag=--startup-profile-seconds", "--server-flag=0"),
        # Loose targets: what is asked here is whether lines are lost, not what they may cost.
        *("--server-flag=--slo-ttft-ms", "--server-flag=2000"),
        *("--server-flag=--slo-tpot-ms", "--server-flag=500"),
    )
    found = chaos.run(chaos.parse_options(flags))
    figures: dict[str, Figure] = {figure.name: figure for figure in found.figures}
    assert {name: figures[name].values[0] for name in ZERO} == dict.fromkeys(ZERO, 0), (
        found.examples
    )
    assert figures["injuries"].values[0] >= len(injuries)
    assert figures["online streams"].values[0] > 0
    assert figures["hostile requests"].values[0] > 0
