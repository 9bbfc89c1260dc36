"""The emulated device by itself: its streams, and those of our parts that only a GPU reaches."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest
import torch

from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.srt.emulation.device_module import EmulatedDevice, VirtualTime, install
from sglang_coserve.srt.safepoint.gates import LeaderGate, device_events
from sglang_coserve.srt.safepoint.instrument import ForwardPreempted, Stops

LAYERS = 16
LAYER_S = 1.0
DEPTH = 1
BATCH = 7


@pytest.fixture
def clock() -> Iterator[VirtualTime]:
    """The time of this process, in which only waiting takes some; with a device beside it."""
    virtual = VirtualTime(0.0)
    undo = install(EmulatedDevice(virtual))
    undo_time = virtual.install()
    yield virtual
    undo_time()
    undo()


def test_streams_run_beside_each_other_and_wait_where_told(clock: VirtualTime) -> None:
    forward, copies = torch.cpu.Stream(priority=0), torch.cpu.Stream()
    with torch.cpu.stream(forward):
        torch.cpu.current_stream().launch(2.0)
        after_two = torch.cpu.Event(enable_timing=True)
        after_two.record()
        forward.launch(1.0)
    copies.launch(0.5)
    copies.wait_event(after_two)
    copies.launch(2.0)
    ended = copies.record_event()
    assert not after_two.query()
    assert after_two.elapsed_time(ended) == pytest.approx(2000.0)
    forward.synchronize()
    assert clock() == pytest.approx(3.0)
    forward.wait_stream(copies)
    forward.launch(1.0)
    torch.cpu.synchronize()
    assert clock() == pytest.approx(5.0)
    assert after_two.query()


def test_waiting_takes_time_at_once(clock: VirtualTime) -> None:
    time.sleep(2.0)
    assert time.perf_counter() == 2.0
    clock.wait_until(4.0)
    assert time.monotonic() == 4.0


# --- What only a GPU reaches -----------------------------------------------------------------


def gate_of(depth: int = DEPTH, *, arrival_s: float = math.inf) -> LeaderGate:
    """Return a gate that learns of an online request which comes at a time."""

    def arrivals() -> list[RequestInfo]:
        has_come = time.perf_counter() >= arrival_s
        return [RequestInfo("a", RequestClass.ONLINE, 1, 1, arrival_s)] if has_come else []

    return LeaderGate(arrivals, device_events("cpu", depth))


def run_layers(
    gate: LeaderGate, until_s: float = math.inf, *, first: int = 0, interval: int = 1
) -> int:
    """Launch layers, with safepoints between them, as fast as the gate lets; return how many."""
    gate.arm(BATCH, Stops(until_s))
    try:
        for number in range(first, LAYERS):
            if number % interval == 0:
                gate.reached(number)
            torch.cpu.current_stream().launch(LAYER_S)
    except ForwardPreempted as stop:
        return stop.layer
    finally:
        gate.disarm()
    return LAYERS


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_host_is_as_far_ahead_of_the_device_as_it_may(
    clock: VirtualTime, depth: int, interval: int
) -> None:
    gate = gate_of(depth)
    assert run_layers(gate, interval=interval) == LAYERS
    left_s = torch.cpu.current_stream().free_s - clock()
    assert left_s == pytest.approx((depth + 1) * interval * LAYER_S, abs=0.01)


@pytest.mark.parametrize("arrival_s", [0.5, 3.0, 7.25])
def test_an_arrival_stops_a_pass_within_the_layers_in_flight(
    clock: VirtualTime, arrival_s: float
) -> None:
    layers = run_layers(gate_of(arrival_s=arrival_s))
    assert layers < LAYERS
    assert clock() - arrival_s < 0.01  # It waits for nothing that is in flight.
    assert torch.cpu.current_stream().free_s - arrival_s <= (DEPTH + 1) * LAYER_S


def test_a_stop_waits_for_what_was_launched_before_the_pass(clock: VirtualTime) -> None:
    """Copies from host memory are there, which the next batch overwrites."""
    torch.cpu.current_stream().launch(3.0)
    assert run_layers(gate_of(arrival_s=1.0)) == 1
    assert clock() >= 3.0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_deadline_stops_a_pass_so_that_the_device_is_free_by_then(
    clock: VirtualTime, depth: int
) -> None:
    layers = run_layers(gate_of(depth), until_s=9.5)
    free_s = torch.cpu.current_stream().free_s
    assert layers < LAYERS
    assert 9.5 - (depth + 2) * LAYER_S <= free_s <= 9.5


def test_the_first_group_runs_also_if_time_is_up(clock: VirtualTime) -> None:
    """A step that never got on would be suspended for ever."""
    gate = gate_of()
    clock.wait_until(5.0)
    assert run_layers(gate, until_s=4.0) == 1
    assert run_layers(gate, until_s=4.0, first=1) == 2
