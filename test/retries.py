"""Lists failed tests that may be tried again: tests that have started processes.

On a machine under load, a process may come too late for a bound of time. Every other test runs in
one process from its beginning to its end, and its failure is a fault.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import subprocess
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, Final

import pytest

OPTION: Final = "--first-failures"
HAS_PROCESSES: Final = ("has processes", True)
"""Property of a test's report."""


class Retries:
    """A plugin of pytest, in each process that runs tests and in the process that reports them.

    A test has processes if one starts while the test runs, or if the test shares a fixture with
    such a test: a server of a package starts in the package's first test.
    """

    def __init__(self, failures: Path | None) -> None:
        self._failures = failures
        self._is_retried: dict[str, bool] = {}
        """For each test that failed: it has processes."""

        self._summaries: list[str] = []
        self._num_started = 0
        self._num_before = 0
        self._shared_with_processes: set[pytest.FixtureDef[Any]] = set()

    # --- in a process that runs tests ---

    def pytest_sessionstart(self) -> None:
        """Count the processes that are started from here on."""
        for owner, name in (
            (subprocess.Popen, "__init__"),
            (multiprocessing.process.BaseProcess, "start"),
        ):
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, starts: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(starts)
        def counted(*args: Any, **options: Any) -> Any:
            self._num_started += 1
            return starts(*args, **options)

        return counted

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        """Remember how many processes there were before a test."""
        self._num_before = self._num_started

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Function) -> None:
        """Mark the report of a test that has processes."""
        definitions = chain.from_iterable(item._fixtureinfo.name2fixturedefs.values())
        shared = {one for one in definitions if one.scope in ("class", "module", "package")}
        if self._num_started > self._num_before:
            self._shared_with_processes |= shared
        elif not shared & self._shared_with_processes:
            return
        if HAS_PROCESSES not in item.user_properties:
            item.user_properties.append(HAS_PROCESSES)

    # --- in the process that reports ---

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure. The report of a worker that crashed has no properties."""
        if report.failed:
            properties = map(tuple, report.user_properties)  # Lists, from another process.
            self._is_retried[report.nodeid] = HAS_PROCESSES in properties
            self._summaries.append(f"{report.nodeid}\n    {reason(report)}\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that cannot be collected: no test of it is tried again."""
        if report.failed:
            self._is_retried[report.nodeid] = False

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the failures if all failed tests may be tried again; else leave the file empty."""
        is_failed = exitstatus == pytest.ExitCode.TESTS_FAILED
        if self._failures and is_failed and all(self._is_retried.values()):
            self._failures.write_text("".join(self._summaries))


def reason(report: pytest.TestReport) -> str:
    """Return where a test failed, and the first line of the error."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return (report.longreprtext.strip().splitlines() or [""])[-1]
    return f"{crash.path}:{crash.lineno}: {(crash.message.splitlines() or [''])[0]}"
