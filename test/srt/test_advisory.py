"""Whatever only observes or advises fails in the real scheduler, and requests are served on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import pytest

from sglang_coserve.core.advisory import Advisory
from sglang_coserve.srt.monitoring.scheduler_query import (
    BATCH_DELAYS,
    LAST_STEPS,
    LONGEST_STEPS,
    STANDING,
    STEPS_OF,
)
from srt.scripted_engine import EngineProcess, ScriptedEngine
from srt.test_planned_scheduler import LOOSE
from srt.test_scheduler import prompt

PARTS = {
    "status": ("status", ("publish_if_due",)),
    "steps": ("status._steps", ("add",)),
    "recompute": ("status._recompute", ("ended",)),
    "load": ("online_load", ("get_pool_stats", "put_into")),
    "safepoint delays": ("lane.safepoints.stats", ("first_token",)),
    "status queries": (
        "status",
        ("internal_state", "state", "batch_delays_s", "last_steps", "longest_steps", "steps_of"),
    ),
    "judgement": (
        "admission.core.interference",
        ("arrived", "worked", "produced", "ended", "advance"),
    ),
    "latency model": ("admission.core._learned", ("observe", "predict_now")),
    "work log": ("admission.core.work", ("ended",)),
    "service time": ("admission.core._service_time", ("observe",)),
    "policy": ("admission.core._policy", ("update",)),
    "shared prefixes": ("admission", ("_report_left",)),
}
"""The same, of those that a planned policy has."""

QUESTIONS = (
    *(f'coserve: ["{question}"]' for question in (STANDING, BATCH_DELAYS)),
    f'coserve: ["{LAST_STEPS}", 1.0, 0.0]',
    f'coserve: ["{LONGEST_STEPS}", 1.0, 2]',
    f'coserve: ["{STEPS_OF}", "on0"]',
    "",
)


@pytest.fixture
def engine(start_engine: Any) -> EngineProcess:
    return start_engine(coserve=LOOSE)


def serve(engine: ScriptedEngine) -> dict[str, list[int]]:
    """Serve requests of both classes, one of them aborted, while questions are asked."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    scheduler = engine.scheduler

    def script(iteration: int) -> Iterator[Any]:
        if iteration > 8:
            raise StopIteration
        scheduler.load_inquirer.get_loads()
        scheduler.get_internal_state(GetInternalStateReq(rid=QUESTIONS[iteration % len(QUESTIONS)]))
        if iteration == 6:
            return iter([engine.abort("gone")])
        if iteration not in (0, 3):
            return iter(())
        one = engine.request(f"on{iteration}", prompt(iteration, 40), 8)
        two = engine.request(f"off{iteration}", prompt(iteration, 150), 8, offline=True)
        gone = engine.request("gone", prompt(1, 90), 60, offline=True)
        return iter([one, two, *([gone] if iteration == 3 else [])])

    engine.run(script)
    outputs = {rid: engine.output(rid) for rid in engine.reqs if rid != "gone"}
    engine.reqs.clear()
    assert not len(scheduler.parts.requests)
    engine.assert_nothing_leaked()
    return outputs


def run_failing(
    engine: ScriptedEngine, parts: dict[str, tuple[str, tuple[str, ...]]]
) -> dict[str, tuple[set[str], int, bool]]:
    """Serve with each method of each part failing: what is off then, how often that was logged, and
    whether the outputs are the same."""
    advisory: Advisory = engine.scheduler.parts.advisory
    expected = serve(engine)
    assert not advisory.off
    logged: list[logging.LogRecord] = []
    logger = logging.getLogger("sglang_coserve.srt.scheduler.parts")
    seen = {}
    for part, (path, methods) in parts.items():
        for method in methods:

            def fail(*_args: Any, **_named: Any) -> None:
                raise ZeroDivisionError("its own fault")

            owner = attrgetter(path)(engine.scheduler.parts)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(owner, method, fail)
                patch.setattr(logger, "error", lambda *args, **_: logged.append(args))
                same = serve(engine) == expected
            assert all(why == "ZeroDivisionError: its own fault" for why in advisory.off.values())
            seen[f"{part}.{method}"] = (set(advisory.off), len(logged), same)
            advisory._off.clear()
            logged.clear()
    return seen


def test_no_advisory_part_ends_the_scheduler_or_changes_an_output(engine: EngineProcess) -> None:
    failed = set()
    for what, (off, times_logged, is_same) in engine.call(run_failing, PARTS).items():
        assert off <= {what.rpartition(".")[0]}, what
        assert times_logged == len(off), what
        assert is_same, what
        failed |= off
    assert failed == set(PARTS)


def test_without_somebody_to_tell_an_error_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        Advisory().tell("part", lambda: 1 // 0)


def test_a_part_that_failed_is_reported_once_and_not_called_again() -> None:
    reported: list[str] = []
    advisory = Advisory(lambda part, error: reported.append(f"{part}: {error}"))

    def fail() -> int:
        raise KeyError("why")

    assert [advisory.ask("part", fail, 7), advisory.ask("part", lambda: 1, 7)] == [7, 7]
    assert advisory.ask("other", lambda: 1, 7) == 1
    assert reported == ["part: 'why'"]
    assert dict(advisory.off) == {"part": "KeyError: 'why'"}
