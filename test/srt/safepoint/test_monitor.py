"""An arrival while a pass runs: the thread that sees it, and the suspension."""

from __future__ import annotations

import pickle
import select
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import zmq

from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.srt.safepoint.gates import PreemptionFlag
from sglang_coserve.srt.safepoint.ingress import ArrivalWatch, Inbox
from srt import test_scheduler as scenarios
from srt.safepoint.live_engine import Talker, run_live, slow_down
from srt.scripted_engine import EngineProcess, ScriptedEngine

# --- The watch ----------------------------------------------------------------------------


@pytest.fixture
def inbox() -> Any:
    box = Inbox()
    yield box
    box.close()


def arrival(rid: str = "on") -> RequestInfo:
    return RequestInfo(rid, RequestClass.ONLINE, 100, 10, time.perf_counter())


def always(arrivals: Sequence[RequestInfo], now_s: float) -> bool:
    return bool(arrivals) and now_s > 0


def test_an_arrival_before_and_one_after_the_batch_opens_raise_the_flag(inbox: Inbox) -> None:
    flag = PreemptionFlag()
    watch = ArrivalWatch(inbox, flag)
    inbox.put("message", (arrival(),))
    watch.consider()
    assert flag.words[0] == 0
    watch.open(5, always)
    assert flag.words[0] == 5
    request = watch.close()
    assert request is not None
    assert [one.rid for one in request.arrivals] == ["on"]
    assert flag.words[0] == 0
    assert inbox.recv_pyobj(zmq.NOBLOCK) == "message"
    watch.open(6, always)
    assert flag.words[0] == 0
    inbox.put("message", (arrival(),))
    watch.consider()
    assert flag.words[0] == 6


def test_a_batch_goes_on_until_one_comes_that_cannot_wait(inbox: Inbox) -> None:
    flag = PreemptionFlag()
    watch = ArrivalWatch(inbox, flag)
    watch.open(5, lambda arrivals, _: len(arrivals) > 1)
    for rid in ("first", "second"):
        assert flag.words[0] == 0
        inbox.put("message", (arrival(rid),))
        watch.consider()
    assert flag.words[0] == 5
    request = watch.close()
    assert request is not None
    assert [one.rid for one in request.arrivals] == ["first", "second"]


def test_no_wake_up_is_lost_whichever_comes_first(inbox: Inbox) -> None:
    """A batch opens and a request arrives at the same moment, many times."""
    flag = PreemptionFlag()
    watch = ArrivalWatch(inbox, flag)
    rounds, start, done = 2000, threading.Barrier(2), threading.Barrier(2)

    def receive() -> None:
        for _ in range(rounds):
            start.wait(10)
            inbox.put("message", (arrival(),))
            watch.consider()
            done.wait(10)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    for batch in range(1, rounds + 1):
        start.wait(10)
        watch.open(batch, always)
        done.wait(10)
        assert flag.words[0] == batch
        inbox.recv_pyobj(zmq.NOBLOCK)
        assert watch.close() is not None
    thread.join(10)


def test_a_message_is_taken_once_and_then_there_is_none(inbox: Inbox) -> None:
    inbox.put("first")
    inbox.put("second")
    assert [inbox.recv_pyobj(zmq.NOBLOCK) for _ in range(2)] == ["first", "second"]
    with pytest.raises(zmq.Again):
        inbox.recv_pyobj(zmq.NOBLOCK)
    inbox.fail(ValueError("broken"))
    with pytest.raises(RuntimeError, match="failed"):
        inbox.recv_pyobj(zmq.NOBLOCK)


# --- The thread ---------------------------------------------------------------------------


def take(inbox: Inbox) -> Any:
    """Wait for the next message."""
    while True:
        try:
            return inbox.recv_pyobj(zmq.NOBLOCK)
        except zmq.Again:
            assert select.select([inbox.wake_fd], [], [], 10)[0]
            inbox.clear_wake()


def test_an_error_in_the_thread_reaches_the_event_loop(inbox: Inbox) -> None:
    from sglang_coserve.srt.safepoint.ingress import SocketMonitor

    context = zmq.Context()
    sender, receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    sender.bind("inproc://requests")
    receiver.connect("inproc://requests")
    monitor = SocketMonitor(receiver, inbox, lambda: None)
    monitor.start()
    sender.send(pickle.dumps("a message"))
    sender.send(b"no message")
    assert take(inbox) == "a message"
    with pytest.raises(RuntimeError, match="the thread that receives requests has failed"):
        take(inbox)
    monitor.stop()
    context.destroy(linger=0)


# --- The engine ---------------------------------------------------------------------------

LIVE = {
    # Without online requests it fills steps as far as that pays, whatever may arrive.
    "offline_policy": "conserve",
    "startup_profile_seconds": 0.0,
    "safepoint_interval": 2,
}
LAYER_S = 0.05


def start_live(start_engine: Any, **settings: Any) -> EngineProcess:
    process = start_engine(max_total_tokens=4096, coserve=LIVE, **settings)
    assert isinstance(process, EngineProcess)
    return process


def long_offline(engine: ScriptedEngine, rid: str) -> Any:
    return engine.request(rid, scenarios.prompt(1, 300), 6, offline=True)


def online(engine: ScriptedEngine, rid: str, marks: dict[str, Any] | None = None) -> Any:
    return engine.request(rid, scenarios.prompt(2, 40), 6, custom_params=marks)


def run_arrival_in_a_pass(engine: ScriptedEngine) -> dict[str, Any]:
    """Each kind of request alone; then both, the online one while the first chunk of the
    offline prompt is computed."""
    begun = slow_down(engine, LAYER_S)

    def talk(talker: Talker) -> None:
        for message in (long_offline(engine, "off alone"), online(engine, "on alone")):
            talker.send(message)
            talker.wait_for_end(message.rid)
        begun.clear()
        talker.send(long_offline(engine, "off"))
        talker.wait(lambda: 1 in begun, "a long pass")
        talker.send(online(engine, "on"))
        for rid in ("on", "off"):
            talker.wait_for_end(rid)

    run_live(engine, talk)
    engine.assert_nothing_leaked()
    return {
        "outputs": {rid: engine.output(rid) for rid in ("off alone", "on alone", "off", "on")},
        "begun": begun,
        "report": engine.scheduler.parts.runner.safepoints.report(),
    }


def test_a_long_prefill_is_suspended_for_an_arrival_and_goes_on_after_it(
    start_engine: Any,
) -> None:
    # Without the radix cache, so that the same prompt takes as long each time.
    run = start_live(start_engine, disable_radix_cache=True).call(run_arrival_in_a_pass)
    outputs, report = run["outputs"], run["report"]
    assert outputs["off"] == outputs["off alone"]
    assert outputs["on"] == outputs["on alone"]
    assert sum(report["suspended"].values()) == report["resumed"] == 1
    # No layer of the long prefill ran twice.
    assert run["begun"][: report["layers"]] == list(range(report["layers"]))
    delays = report["delays_ms"]
    assert {name: summary["n"] for name, summary in delays.items()} == dict.fromkeys(delays, 1)
    parts = sum(delays[name]["p50"] for name in ("arrival_to_flag", "flag_to_stop"))
    assert delays["arrival_to_stop"]["p50"] == pytest.approx(parts)


def run_arrivals_with_targets(engine: ScriptedEngine) -> dict[float, tuple[int, list[int]]]:
    """For each target in ms of an online request that arrives in a long pass: how often that was
    suspended, and the output of the offline request."""
    begun = slow_down(engine, LAYER_S)
    suspended = engine.scheduler.parts.runner.safepoints.stats.suspensions
    seen: dict[float, tuple[int, list[int]]] = {}

    def talk(talker: Talker) -> None:
        for target_ms in (60_000, 0.01):
            before = suspended.total()
            begun.clear()
            off, on = f"off {target_ms}", f"on {target_ms}"
            talker.send(long_offline(engine, off))
            talker.wait(lambda: 1 in begun, "a long pass")
            talker.send(online(engine, on, {"coserve_slo_ttft_ms": target_ms}))
            for rid in (on, off):
                talker.wait_for_end(rid)
            seen[target_ms] = suspended.total() - before, engine.output(off)

    run_live(engine, talk)
    return seen


def test_an_arrival_waits_for_a_long_prefill_if_its_target_leaves_time(start_engine: Any) -> None:
    # An engine of its own: the others' counts are of one arrival.
    process = start_live(start_engine, disable_radix_cache=True, max_running_requests=8)
    seen = process.call(run_arrivals_with_targets)
    assert {target_ms: count for target_ms, (count, _) in seen.items()} == {60_000: 0, 0.01: 1}
    assert seen[60_000][1] == seen[0.01][1]


def run_idle(engine: ScriptedEngine, seconds: float) -> int:
    """Count the passes of the idle loop while nothing happens, between two requests."""
    scheduler = engine.scheduler
    on_idle = scheduler.on_idle
    passes = 0
    in_silence = 0

    def counted() -> None:
        nonlocal passes
        passes += 1
        on_idle()

    def talk(talker: Talker) -> None:
        nonlocal in_silence
        talker.send(engine.request("first", scenarios.prompt(1, 20), 3))
        talker.wait_for_end("first")
        before = passes
        time.sleep(seconds)
        in_silence = passes - before
        talker.send(engine.request("second", scenarios.prompt(2, 20), 3))
        talker.wait_for_end("second")

    scheduler.on_idle = counted
    run_live(engine, talk)
    return in_silence


@pytest.mark.parametrize(
    "settings",
    [{"sleep_on_idle": False}, {"sleep_on_idle": True}],
    ids=["stock", "--sleep-on-idle"],
)
def test_an_idle_engine_sleeps_until_a_request_comes(
    start_engine: Any, settings: dict[str, Any]
) -> None:
    process = start_live(start_engine, disable_radix_cache=True, **settings)
    assert process.call(run_idle, 0.5) <= 3
