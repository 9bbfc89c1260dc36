"""Every end of a request is noticed, whoever ends it, on the real scheduler."""

from __future__ import annotations

import time
from typing import Any

import pytest

from sglang_coserve.core.request import RequestClass
from srt import test_scheduler as scenarios
from srt.scripted_engine import EngineProcess, ScriptedEngine

CHUNK_TOKENS = 64
RELAXED = {"offline_policy": "coserve", "slo_ttft_ms": 60_000.0, "slo_tpot_ms": 60_000.0}
SETTINGS: dict[str, Any] = {
    "chunked_prefill_size": CHUNK_TOKENS,
    "max_queued_requests": 4,
    "enable_priority_scheduling": True,
}


@pytest.fixture(params=[False, True], ids=["normal", "overlap"])
def engine(request: pytest.FixtureRequest, start_engine: Any) -> EngineProcess:
    return start_engine(overlap=request.param, page_size=1, coserve=RELAXED, **SETTINGS)


def known_rids(engine: ScriptedEngine) -> set[str]:
    """What any of the parts still knows of requests."""
    parts = engine.scheduler.parts
    rids = {live.req.rid for live in parts.requests}
    core = parts.admission.core
    rids |= {f"queued-{number}" for number in range(len(core.queue) + core.queue.num_running)}
    rids |= {f"watched-{number}" for number in range(len(core.interference))}
    return rids


def num_judged(engine: ScriptedEngine) -> int:
    interference = engine.scheduler.parts.admission.core.interference
    return int(interference.monitor.report(time.perf_counter()).requests)


def num_missed(engine: ScriptedEngine) -> int:
    """Online requests that count as misses."""
    report = engine.scheduler.parts.admission.core.interference.monitor.report(time.perf_counter())
    return 0 if report.attainment is None else round((1 - report.attainment) * report.requests)


def assert_all_noticed(engine: ScriptedEngine) -> None:
    engine.assert_nothing_leaked()
    assert known_rids(engine) == set()


def backlog(engine: ScriptedEngine, count: int = 4) -> list[Any]:
    return [
        engine.request(f"off{i}", scenarios.prompt(i, 50), 150, offline=True) for i in range(count)
    ]


def run_disconnect_between_chunks(engine: ScriptedEngine) -> dict[str, bool]:
    """Abort an online prompt of many chunks beside a backlog; serve others while that is there."""
    scheduler, found = engine.scheduler, {"was_chunk": False, "known": True, "beside": False}
    before = num_judged(engine)

    def script(iteration: int) -> list[Any]:
        if iteration == 0:
            return backlog(engine)
        if iteration == 4:
            return [engine.request("long", scenarios.prompt(50, 500), 4)]
        if iteration == 7:
            chunk = scheduler.chunked_req
            found["was_chunk"] = chunk is not None and chunk.rid == "long"
            return [engine.abort("long")]
        if iteration == 10:
            found["known"] = "long" in scheduler.parts.requests
            return [engine.request(f"on{i}", scenarios.prompt(60 + i, 20), 3) for i in range(3)]
        if num_judged(engine) - before == 3 or iteration > 900:
            found["beside"] = any(not engine.reqs[f"off{i}"].finished() for i in range(4))
            raise StopIteration
        return []

    engine.run(script)
    assert_all_noticed(engine)
    assert num_judged(engine) - before == 3
    return found


def test_a_client_that_leaves_between_two_chunks_does_not_stop_the_judging(
    engine: EngineProcess,
) -> None:
    found = engine.call(run_disconnect_between_chunks)
    assert found == {"was_chunk": True, "known": False, "beside": True}


def run_full_queue(engine: ScriptedEngine) -> tuple[set[str], set[str]]:
    """Fill the queue; displace some that wait. Return who was answered with an abort, and who
    had tokens."""
    rids = [f"on{i}" for i in range(12)]

    def script(iteration: int) -> list[Any]:
        if iteration == 0:
            return backlog(engine)
        if iteration == 3:
            messages = []
            for number, rid in enumerate(rids):
                messages.append(engine.request(rid, scenarios.prompt(number, 60), 4))
                messages[-1].priority = number % 6
            return messages
        if iteration == 4:
            parts = engine.scheduler.parts
            waiting = {req.rid for req in engine.scheduler.waiting_queue}
            online = {live.req.rid for live in parts.requests.of_class(RequestClass.ONLINE)}
            begun = {rid for rid in online if parts.requests.has_begun(rid)}
            assert online == waiting | begun
        if iteration > 4:
            raise StopIteration
        return []

    engine.run(script)
    assert_all_noticed(engine)
    served = {rid for rid in rids if engine.output(rid)}
    return served, set(rids) - served


def test_whom_a_full_queue_refuses_or_displaces_is_forgotten(engine: EngineProcess) -> None:
    served, refused = engine.call(run_full_queue)
    assert len(served) >= 4
    assert len(refused) >= 4
    # The first ones were in before any of a higher priority.
    assert refused & {"on0", "on1", "on2", "on3"}


def run_refused_priority(engine: ScriptedEngine) -> None:
    scheduler = engine.scheduler
    scheduler.enable_priority_scheduling, scheduler.abort_on_priority_when_disabled = False, True
    try:
        offline, online = (
            engine.request(rid, scenarios.prompt(1, 20), 4, offline=rid == "off")
            for rid in ("off", "on")
        )
        offline.priority = online.priority = 3
        engine.run([offline, online])
    finally:
        scheduler.enable_priority_scheduling = True
        scheduler.abort_on_priority_when_disabled = False
    assert_all_noticed(engine)


def test_a_priority_that_is_refused_is_forgotten(engine: EngineProcess) -> None:
    engine.call(run_refused_priority)


def run_out_of_memory(engine: ScriptedEngine) -> None:
    """No memory is left for the only request: nothing can be retracted for it."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    has_memory, missed = ScheduleBatch.check_decode_mem, num_missed(engine)

    def script(iteration: int) -> list[Any]:
        if iteration == 0:
            return [engine.request("only", scenarios.prompt(1, 50), 40)]
        if len(engine.output("only")) == 3:
            ScheduleBatch.check_decode_mem = lambda *_args, **_options: False
        if (not engine.scheduler.running_batch.reqs and iteration > 3) or iteration > 60:
            raise StopIteration
        return []

    try:
        engine.run(script)
    finally:
        ScheduleBatch.check_decode_mem = has_memory
    assert 3 <= len(engine.output("only")) < 40
    assert num_missed(engine) == missed + 1
    assert_all_noticed(engine)


def test_a_request_for_which_no_memory_is_left_is_forgotten(engine: EngineProcess) -> None:
    engine.call(run_out_of_memory)


def run_grammar_beside_offered(engine: ScriptedEngine) -> int:
    """Let an online request's grammar be ready while many offline requests wait."""
    offline = [
        engine.request(f"off{i}", scenarios.prompt(i, 50), 60, offline=True) for i in range(30)
    ]
    online = engine.request("on", scenarios.prompt(90, 20), 4, json_schema='{"type": "object"}')
    engine.run([*offline, online])
    assert_all_noticed(engine)
    return len(engine.output("on"))


def test_offered_offline_requests_do_not_fill_the_queue_of_online_ones(
    engine: EngineProcess,
) -> None:
    assert engine.call(run_grammar_beside_offered) == 4


def run_abort_all(engine: ScriptedEngine) -> None:
    """At any step, requests of both classes in all states."""
    for last in (1, 2, 3, 5, 8):
        online = [engine.request(f"on{i}", scenarios.prompt(i, 150), 9) for i in range(3)]
        engine.run({0: [*backlog(engine), *online], last: [engine.abort(abort_all=True)]})
        assert_all_noticed(engine)


def test_all_that_is_aborted_at_once_is_forgotten(engine: EngineProcess) -> None:
    engine.call(run_abort_all)


def run_abort_one(engine: ScriptedEngine, when: int) -> dict[str, str]:
    """Abort one of several requests whose names begin alike; return how all have ended."""
    names = {"r-1": False, "r-10": False, "r-1000": False, "r-11": True, "r-12": True}
    requests = [
        engine.request(name, scenarios.prompt(place, 90), 12, offline)
        for place, (name, offline) in enumerate(names.items())
    ]
    engine.run({0: requests, when: [engine.abort("r-1")]})
    engine.assert_nothing_leaked()
    return {name: type(engine.reqs[name].finished_reason).__name__ for name in names}


@pytest.mark.parametrize("when", [1, 4])
def test_a_request_is_aborted_alone_though_the_names_of_others_begin_with_its_name(
    engine: EngineProcess, when: int
) -> None:
    ended = engine.call(run_abort_one, when)
    assert ended.pop("r-1") != "FINISH_LENGTH"
    assert set(ended.values()) == {"FINISH_LENGTH"}, ended


def run_lost(engine: ScriptedEngine) -> tuple[int, int, int]:
    """Take a request out of SGLang's queue behind everybody's back, beside an endless backlog."""
    scheduler, live = engine.scheduler, engine.scheduler.parts.endings
    rounds, missed = 0, num_missed(engine)

    def script(iteration: int) -> list[Any]:
        nonlocal rounds
        if iteration == 0:
            return [engine.request("off", scenarios.prompt(1, 20), 900, offline=True)]
        if iteration == 3:
            return [engine.request(rid, scenarios.prompt(2, 200), 4) for rid in ("lost", "a", "b")]
        if iteration == 4:
            lost = engine.reqs["b"]
            assert lost in scheduler.waiting_queue
            scheduler.waiting_queue = [r for r in scheduler.waiting_queue if r is not lost]
            return [engine.request("b", scenarios.prompt(3, 20), 4)]
        if live.num_unnoticed and not rounds:
            rounds = iteration
        if (rounds and engine.reqs["b"].finished()) or iteration > 600:
            assert not engine.reqs["off"].finished()
            raise StopIteration
        return []

    engine.run(script)
    found = live.num_unnoticed
    live.num_unnoticed = 0
    assert_all_noticed(engine)
    return found, rounds, num_missed(engine) - missed


def test_a_request_that_gets_lost_is_found_while_the_engine_is_busy(engine: EngineProcess) -> None:
    """Its name is then free for the one that waits for it."""
    found, rounds, missed = engine.call(run_lost)
    assert found == 1
    assert rounds <= 4 + 256 + 2
    assert missed == 1
