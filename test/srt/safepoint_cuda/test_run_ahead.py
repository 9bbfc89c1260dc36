"""The host stays close to the device in an armed batch, and only there."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest

from sglang_coserve.srt.safepoint.gates import LeaderGate, PreemptionFlag
from sglang_coserve.srt.safepoint.instrument import ForwardPreempted, add_safepoints
from srt.safepoint_cuda.device_thread import (
    WAIT_S,
    DeviceEvent,
    DeviceModel,
    DeviceThread,
    wait_for,
)

LAYERS = 12


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    thread = DeviceThread()
    yield thread
    thread.close()


class Engine:
    """Layers on a device, with safepoints between them."""

    def __init__(
        self, device: DeviceThread, *, depth: int, interval: int, layer_s: float = 0.0
    ) -> None:
        self.flag = PreemptionFlag()
        self.events = [DeviceEvent(device) for _ in range(depth + 1)]
        self.gate = LeaderGate(self.flag, self.events)
        self.model = DeviceModel(device, LAYERS, layer_s)
        add_safepoints(self.model.layers, interval, self.gate)

    def run(self, batch: int) -> ForwardPreempted | None:
        """Run an armed batch; return how it was stopped, if it was."""
        self.gate.arm(batch)
        try:
            self.model.run()
        except ForwardPreempted as preempted:
            return preempted
        finally:
            self.gate.disarm()
        return None


# --- How far ahead ------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [1, 3, 4])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_host_is_never_further_ahead(device: DeviceThread, depth: int, interval: int) -> None:
    engine = Engine(device, depth=depth, interval=interval, layer_s=0.0005)
    for batch in range(1, 6):
        assert engine.run(batch) is None
        # The end of a pass has no safepoint: the next one's first wait is for it.
        wait_for(lambda b=batch: engine.model.done == b * LAYERS, "the end of the pass")
    assert engine.model.most_outstanding <= (depth + 1) * interval


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("depth", [0, 1])
def test_the_device_has_work_for_as_long_as_it_may(
    device: DeviceThread, depth: int, interval: int
) -> None:
    """On a device that stands still the host launches all that the depth allows, and waits."""
    engine = Engine(device, depth=depth, interval=interval)
    stalls: list[threading.Event] = []

    def stall_first(number: int) -> None:
        if number == 0:
            stalls.append(device.launch_stall())

    engine.model.before_launch = stall_first
    host = threading.Thread(target=engine.run, args=(1,), daemon=True)
    host.start()
    allowed = (depth + 1) * interval
    wait_for(lambda: engine.model.launched == allowed, "the layers that the depth allows")
    host.join(0.05)
    assert host.is_alive()
    assert engine.model.launched == allowed
    stalls[0].set()
    host.join(WAIT_S)
    assert engine.model.launched == LAYERS


def test_a_batch_that_is_not_armed_records_and_waits_for_nothing(device: DeviceThread) -> None:
    engine = Engine(device, depth=1, interval=1)
    released = device.launch_stall()
    engine.gate.arm(1)
    engine.gate.disarm()
    engine.model.run()
    assert engine.model.launched == LAYERS
    assert not any(event.records for event in engine.events)
    released.set()


# --- How it stops -------------------------------------------------------------------------


def test_a_stop_does_not_wait_for_what_is_in_flight(device: DeviceThread) -> None:
    """And what is in flight runs to its end."""
    engine = Engine(device, depth=1, interval=2)
    stalls: dict[int, threading.Event] = {}

    def stall(number: int) -> None:
        if number == 2:
            stalls[number] = device.launch_stall()

    engine.model.before_launch = stall

    def arrive() -> None:
        # The host waits at layer 6 for the group that begins with layer 2.
        wait_for(lambda: engine.model.launched == 6, "the third group")
        engine.flag.raise_for(1)

    monitor = threading.Thread(target=arrive, daemon=True)
    monitor.start()
    preempted = engine.run(1)
    assert preempted is not None
    assert preempted.layer == 6
    assert engine.model.done == 2
    stalls[2].set()
    monitor.join(WAIT_S)
    wait_for(lambda: engine.model.done == 6, "the end of what was launched")


def test_a_stop_waits_for_what_was_launched_before_the_pass(device: DeviceThread) -> None:
    """Copies from host memory are there, which the next batch overwrites."""
    engine = Engine(device, depth=1, interval=2)
    released = device.launch_stall()
    is_released = False

    def arrive() -> None:
        nonlocal is_released
        wait_for(lambda: engine.model.launched == 2, "the first group")
        engine.flag.raise_for(1)
        time.sleep(0.05)
        is_released = True
        released.set()

    monitor = threading.Thread(target=arrive, daemon=True)
    monitor.start()
    preempted = engine.run(1)
    assert preempted is not None
    assert preempted.layer == 2
    assert is_released
    monitor.join(WAIT_S)


def test_a_flag_for_another_batch_stops_nothing(device: DeviceThread) -> None:
    engine = Engine(device, depth=1, interval=1, layer_s=0.0005)
    engine.flag.raise_for(6)
    assert engine.run(7) is None
    assert engine.model.most_outstanding <= 2


def test_batches_stop_at_whatever_layer_the_flag_is_raised(device: DeviceThread) -> None:
    engine = Engine(device, depth=1, interval=2, layer_s=0.0001)
    rng = random.Random(1)
    for batch in range(1, 60):
        engine.flag.lower()
        target = rng.randrange(LAYERS - 2)

        def raise_at(number: int, target: int = target, batch: int = batch) -> None:
            if number == target:
                engine.flag.raise_for(batch)

        engine.model.before_launch = raise_at
        preempted = engine.run(batch)
        assert preempted is not None
        assert preempted.layer == target // 2 * 2 + 2
    assert engine.model.most_outstanding <= 4 + 4  # The stopped batch's and the next one's.
