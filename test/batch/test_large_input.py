"""Many lines, and long ones: all are served or named, and the server stays small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batch.manual_clock import ManualClock
from batch.scenarios import line, lines, opened
from batch.scripted_backend import ScriptedBackend, name_of
from sglang_coserve.jsonl.body_limits import BodyLimits

TEST_DIRECTORY = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "num_lines",
    [20_000, pytest.param(1_000_000, marks=pytest.mark.heavy)],
    ids=["20,000 lines", "1,000,000 lines"],
)
def test_memory_does_not_grow_with_the_file(tmp_path: Path, num_lines: int) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("large_child.py")), tmp_path, str(num_lines)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TEST_DIRECTORY), *sys.path])},
        check=True,
        timeout=600,
    )
    found = json.loads(done.stdout)
    assert found["completed"] == num_lines
    # The tokens of 20,000 lines alone would take 40 MiB.
    assert found["server_mib"] < found["start_mib"] + 25
    assert found["validator_mib"] < 150


SMALL = BodyLimits(max_bytes=2000, max_values=50, max_objects=10)
LARGE = {
    "bytes": line("large", text="x" * 3000),
    "values": line("large", list=[1] * 60),
    "objects": line("large", list=[{}] * 11),
}


@pytest.mark.parametrize("what", LARGE)
async def test_a_large_line_fails_alone(tmp_path: Path, what: str) -> None:
    backend = ScriptedBackend(limits=SMALL)
    async with (scene := await opened(tmp_path, backend)).service:
        # The first line is the one that may begin with a byte order mark.
        content = b"\xef\xbb\xbf" + LARGE[what].encode() + b"\r\n" + lines(3)
        batch = await scene.ends((await scene.create(content)).id)
        assert batch.status == "completed"
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (4, 3, 1)
        response = (await scene.records(batch))["large"]["response"]
        assert response["status_code"] == 413
        assert what in response["body"]["error"]["message"]
        assert {name_of(request) for request in backend.started} == {"id-1", "id-2", "id-3"}


async def test_a_large_line_of_a_closed_window_is_named(tmp_path: Path) -> None:
    backend = ScriptedBackend(holds=True, limits=SMALL)
    async with (scene := await opened(tmp_path, backend, ManualClock())).service:
        content = lines(1) + LARGE["bytes"].encode()
        batch = await scene.create(content, window="1h")
        await scene.in_flight(1)
        scene.clock.advance(7200)
        batch = await scene.ends(batch.id)
        assert batch.status == "expired"
        assert set(await scene.records(batch)) == {"id-1", "large"}
