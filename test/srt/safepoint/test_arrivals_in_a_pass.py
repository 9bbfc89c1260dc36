"""An arrival while a pass runs: it is seen at the next safepoint, and read once."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import zmq
from sglang.srt.managers import io_struct

from sglang_coserve.srt.safepoint.inbox import Inbox
from srt import test_scheduler as scenarios
from srt.safepoint.live_engine import Talker, run_live, slow_down
from srt.scripted_engine import EngineProcess, ScriptedEngine


def test_what_was_seen_is_read_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_struct, "_USE_PICKLE_IPC", True)
    with (
        zmq.Context() as context,
        context.socket(zmq.PUSH) as sender,
        context.socket(zmq.PULL) as socket,
    ):
        sender.bind("inproc://requests")
        socket.connect("inproc://requests")
        inbox = Inbox(socket)
        for message in ("seen", "seen, too"):
            sender.send(pickle.dumps(message))
        assert inbox.arrivals() == []  # They are no requests.
        sender.send(pickle.dumps("not seen"))
        read = [inbox.recv_pyobj(zmq.NOBLOCK) for _ in range(3)]
        assert read == ["seen", "seen, too", "not seen"]
        with pytest.raises(zmq.Again):
            inbox.recv_pyobj(zmq.NOBLOCK)


LIVE = {
    # Without online requests it fills steps as far as that pays, whatever may arrive.
    "offline_policy": "conserve",
    "startup_profile_seconds": 0.0,
    "safepoint_interval": 2,
}
LAYER_S = 0.2


def start_live(start_engine: Any, **settings: Any) -> EngineProcess:
    return start_engine(max_total_tokens=4096, coserve=LIVE, **settings)


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
        talker.wait(lambda: 0 in begun, "a long pass")
        talker.send(online(engine, "on"))
        for rid in ("on", "off"):
            talker.wait_for_end(rid)

    run_live(engine, talk)
    engine.assert_nothing_leaked()
    return {
        "outputs": {rid: engine.output(rid) for rid in ("off alone", "on alone", "off", "on")},
        "begun": begun,
        "report": engine.scheduler.parts.lane.safepoints.state()["safepoints"],
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


def run_arrivals_with_targets(engine: ScriptedEngine) -> dict[float, tuple[int, list[int]]]:
    """For each target in ms of an online request that arrives in a long pass: how often that was
    suspended, and the output of the offline request."""
    begun = slow_down(engine, LAYER_S)
    suspended = engine.scheduler.parts.lane.safepoints.stats.suspensions
    seen: dict[float, tuple[int, list[int]]] = {}

    def talk(talker: Talker) -> None:
        for target_ms in (60_000, 0.01):
            before = suspended.total()
            begun.clear()
            off, on = f"off {target_ms}", f"on {target_ms}"
            talker.send(long_offline(engine, off))
            talker.wait(lambda: 0 in begun, "a long pass")
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
