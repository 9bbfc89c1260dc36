"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from forked_servers import ForkedServers

# No test depends on how fast the machine is.
settings.register_profile("any_machine", deadline=None)
settings.load_profile("any_machine")


# Two tests run at a time, on two cores; and a process with threads of OpenMP cannot fork.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell lets what it starts in the background ignore SIGINT, and the processes that tests
# interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


SRT = Path(__file__).parent / "srt"
SHARED = {"batch_backend", "batch_server", "monitoring", "view"}
"""Packages whose tests share a server."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file, or a package with a server, in one process; begin with what takes longest."""
    for item in items:
        directory = item.path.parent
        name = directory if directory.name in SHARED and directory.parent == SRT else item.path
        item.add_marker(pytest.mark.xdist_group(str(name)))
    items.sort(key=lambda item: SRT not in item.path.parents)


@pytest.fixture(scope="session", autouse=True)
def forked_servers() -> Iterator[None]:
    """Let servers fork from a process that has SGLang imported."""
    from sglang_coserve.local_server import ChildServer

    servers = ForkedServers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChildServer, "start_process", staticmethod(servers.start))
        yield
    servers.close()


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers whose greedy outputs vary."""
    from sglang_coserve.small_model import SmallModelSpec, make_small_model

    directory = tmp_path_factory.mktemp("small_model")
    return make_small_model(directory, SmallModelSpec(hidden=64, layers=2, context=1024))
