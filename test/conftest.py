"""Fixtures shared by all tests."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from xdist.scheduler import LoadScopeScheduling

import retries
from forked_processes import ForkedServers

# No test depends on how fast the machine is.
ANY_MACHINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("check", derandomize=True, **ANY_MACHINE)
# Hypothesis itself chooses `derandomize` where the environment says that it is a CI.
settings.register_profile("explore", derandomize=False, print_blob=True, **ANY_MACHINE)
settings.load_profile("check")

# Hypothesis draws some values from the constants of all modules that are imported. The examples of
# a test, or of a seed, would depend on the tests that ran before.
providers.is_local_module_file = lambda _path: False


# More tests than cores run at a time; and a process with threads of OpenMP cannot fork.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell lets what it starts in the background ignore SIGINT, and the processes that tests
# interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


DRAWS_EXAMPLES = {"given", "run_state_machine_as_test"}
"""Functions of Hypothesis that a test calls."""

SHARED = ("batch_backend", "batch_server", "monitoring", "view")
"""Packages of ``test/srt`` whose tests share a server."""


class Scheduling(LoadScopeScheduling):
    """Keeps a file, or a package with a server, in one of the processes that run tests."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        package = file.rsplit("/", 1)[0]
        return package if package.endswith(tuple(f"test/srt/{name}" for name in SHARED)) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        retries.OPTION, type=Path, help="file for failures, if all failed tests may be tried again"
    )


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    failures = None if is_worker else config.getoption(retries.OPTION)
    config.pluginmanager.register(retries.Retries(failures))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Begin with what takes longest: what starts servers or installs packages."""
    long = tuple(str(Path(__file__).with_name(name)) for name in ("demo", "srt", "test_base_"))
    items.sort(key=lambda item: not str(item.path).startswith(long))
    for item in items:
        # Hypothesis itself marks only the tests that are properties as a whole.
        if DRAWS_EXAMPLES.intersection(item.function.__code__.co_names):
            item.add_marker("hypothesis")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, or each example of one, on an event loop of its own."""
    given = getattr(pyfuncitem.obj, "hypothesis", None)
    if given is not None and inspect.iscoroutinefunction(example := given.inner_test):
        given.inner_test = lambda *values, **named: asyncio.run(example(*values, **named))
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Capture warnings although an engine of an earlier test has set the level of all loggers."""
    if logging.getLogger().level > logging.WARNING:
        caplog.set_level(logging.WARNING)
    return caplog


@pytest.fixture(scope="session", autouse=True)
def forked_servers() -> Iterator[ForkedServers]:
    """Let servers fork from a process that has SGLang imported."""
    from sglang_coserve.local_server import ChildServer

    servers = ForkedServers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChildServer, "start_process", staticmethod(servers.start))
        yield servers
    servers.close()


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers whose greedy outputs vary."""
    from sglang_coserve.small_model import SmallModelSpec, make_small_model

    directory = tmp_path_factory.mktemp("small_model")
    return make_small_model(directory, SmallModelSpec(hidden=64, layers=2, context=1024))
