"""Tests with processes that fail are listed, to be tried again, unless another test fails, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
from pathlib import Path

from retries import Retries


def pytest_configure(config):
    is_worker = hasattr(config, "workerinput")
    config.pluginmanager.register(Retries(None if is_worker else Path("failures")))
"""
HEAD = """
import multiprocessing
import subprocess

import pytest


@pytest.fixture(scope="module")
def server():
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_server(server):
    assert server.poll() is None
"""
SHARES_SERVER = "def test_shares_server(server): assert not server\n"
SERVER_ENDS = """
@pytest.fixture
def mortal():
    multiprocessing.get_context("fork").Process(target=int).start()
    raise OSError("it has ended")


def test_mortal(mortal): pass
"""
ALONE = "def test_alone(): assert 1 == 2\n"


@pytest.mark.parametrize(
    ("tests", "listed"),
    [
        ("", []),
        (ALONE, []),
        (SHARES_SERVER + ALONE, []),
        (SHARES_SERVER, ["test_it.py::test_shares_server", "AssertionError"]),
        (SERVER_ENDS, ["test_it.py::test_mortal", "OSError: it has ended"]),
        (SHARES_SERVER + "raise OSError", []),
    ],
    ids=["none", "alone", "both", "shared server", "fixture", "collection"],
)
def test_failures_are_listed_only_if_all_failed_tests_have_processes(
    tmp_path: Path, tests: str, listed: list[str]
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(HEAD + tests)
    (tmp_path / "failures").touch()
    words = ("-q", "--rootdir", ".", "-c", os.devnull, "--numprocesses", "1")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    # A worker of this run must not be taken for a worker of that run.
    environment = {n: v for n, v in environment.items() if not n.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode == 0) == (not tests), done.stdout
    found = (tmp_path / "failures").read_text()
    assert all(part in found for part in listed), found
    assert bool(found) == bool(listed), found
