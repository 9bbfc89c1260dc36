"""A stream of work without a GPU: a thread that runs what is launched, one after the other."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from torch import nn

WAIT_S = 10.0


class DeviceThread:
    """Runs work in the order of its launch; the launching thread goes on at once."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def launch(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def launch_stall(self) -> threading.Event:
        """Launch work that lasts until the returned event is set, or a failed test has hung."""
        released = threading.Event()
        self.launch(lambda: released.wait(WAIT_S))
        return released

    def close(self) -> None:
        """Run what is left, and end."""
        self._work.put(None)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class DeviceEvent:
    """A mark in the work of a ``DeviceThread``, to be set again and again."""

    def __init__(self, device: DeviceThread) -> None:
        self._device = device
        self._passed = threading.Event()
        self.records = 0

    def record(self) -> None:
        self.records += 1
        self._passed = threading.Event()
        self._device.launch(self._passed.set)

    def query(self) -> bool:
        return self._passed.is_set()


class DeviceModel:
    """Layers that launch their work instead of doing it."""

    def __init__(self, device: DeviceThread, num_layers: int, layer_s: float = 0.0) -> None:
        self.layers = [_Layer(self, number) for number in range(num_layers)]
        self.launched = 0
        self.done = 0
        self.most_outstanding = 0
        self.before_launch: Callable[[int], object] = lambda _number: None
        self._device = device
        self._layer_s = layer_s

    def run(self) -> None:
        """A forward pass; returns when all is launched."""
        for layer in self.layers:
            layer(None)

    def launch_layer(self, number: int) -> None:
        self.before_launch(number)
        self.launched += 1
        self.most_outstanding = max(self.most_outstanding, self.launched - self.done)
        self._device.launch(self._compute)

    def _compute(self) -> None:
        time.sleep(self._layer_s)
        self.done += 1


class _Layer(nn.Module):
    def __init__(self, model: DeviceModel, number: int) -> None:
        super().__init__()
        # Not as a submodule, nor in a cycle of modules.
        self._launch = model.launch_layer
        self._number = number

    def forward(self, x: Any, **_kwargs: Any) -> Any:
        self._launch(self._number)
        return x


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Return once the condition holds."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never came: {what}"
        time.sleep(0.0002)
