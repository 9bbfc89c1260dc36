"""Fixtures shared by all tests."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import settings

# No test depends on how fast the machine is.
settings.register_profile("any_machine", deadline=None)
settings.load_profile("any_machine")


# A shell lets what it starts in the background ignore SIGINT, and the processes that tests
# interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# They take minutes for a few tests: begun last, they would run alone at the end.
_LONGEST = {"test_chaos.py", "test_documented_fleet.py", "test_fleet_chaos.py", "test_ray_jobs.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in _LONGEST)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers whose greedy outputs vary."""
    from sglang_coserve.small_model import SmallModelSpec, make_small_model

    directory = tmp_path_factory.mktemp("small_model")
    return make_small_model(directory, SmallModelSpec(hidden=64, layers=2, context=1024))
