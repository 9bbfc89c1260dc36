"""A file of a million lines: everything in it is served, and the server stays small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
        env=os.environ | {"PYTHONPATH": str(TEST_DIRECTORY)},
        check=True,
        timeout=600,
    )
    found = json.loads(done.stdout)
    assert found["completed"] == num_lines
    # The tokens of 20,000 lines alone would take 40 MiB.
    assert found["server_mib"] < found["start_mib"] + 25
    assert found["validator_mib"] < 150
