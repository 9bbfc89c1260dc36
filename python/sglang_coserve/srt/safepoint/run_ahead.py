"""Limits how far the host runs ahead of the GPU in a batch that may be suspended.

The host launches a forward pass faster than the GPU computes it. When an online request arrives,
the remaining layers would be in the stream already, from which they cannot be removed, so a check
on the host alone would be useless. Therefore at every safepoint of an armed
batch the host records an event, and waits until the GPU is close behind.

Kernels that were launched run to their end, also after the pass has stopped. The host knows where
it stopped: it keeps the outputs of the last layer, whether computed yet or not, and the steps
that run meanwhile are launched later on the same stream. Only a dropped batch releases memory
to others; see ``order_behind_pass``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch

from sglang_coserve.srt.device import runs_beside_host
from sglang_coserve.srt.safepoint.gates import PreemptionFlag
from sglang_coserve.srt.safepoint.instrument import Gate

__all__ = ["RunAheadGate", "StreamEvent", "device_events", "order_behind_pass"]

_POLL_S: Final = 50e-6
"""Sleep between two checks of an event. Spinning would keep the interpreter lock from the thread
that receives requests; a group of layers takes milliseconds."""


class StreamEvent(Protocol):
    """A marker in the device's stream, such as ``torch.cuda.Event``."""

    def record(self) -> None:
        """Place the marker after all work launched so far, instead of its previous position."""
        ...

    def query(self) -> bool:
        """Return whether the device has passed the marker."""
        ...


class RunAheadGate:
    """A gate at which the host waits for the device before it asks another gate.

    Work after the i-th safepoint is launched only once the device has passed the
    (i - depth)-th. So at most ``depth`` + 1 groups of layers are outstanding, and the pass
    has stopped when these have run. With depth 0 the device idles at every safepoint while
    the host launches the next group; with depth 1 it has one group to compute meanwhile.
    """

    def __init__(self, gate: Gate, flag: PreemptionFlag, events: Sequence[StreamEvent]) -> None:
        """``gate`` decides, by ``flag``; ``events`` has depth + 1 elements."""
        # Makes every safepoint of an armed batch call ``reached``, not only when the flag is up.
        self.attention = memoryview(torch.zeros(1, dtype=torch.int32).numpy())
        self.depth = len(events) - 1
        assert self.depth >= 0
        self._gate = gate
        self._flag = flag.words
        self._events = tuple(events)
        self._passed = 0

    def arm(self, batch: int) -> None:
        """See ``Gate.arm``."""
        self._gate.arm(batch)
        self._passed = 0
        self.attention[0] = batch

    def disarm(self) -> None:
        """See ``Gate.disarm``."""
        self.attention[0] = 0
        self._gate.disarm()

    def reached(self, layer: int) -> None:
        """See ``Gate.reached``. The other gate is asked exactly once, as follower ranks need it."""
        here, self._passed = self._passed, self._passed + 1
        self._events[here % len(self._events)].record()
        if here or not self.depth:
            self._wait_for(max(here - self.depth, 0))
        self._gate.reached(layer)

    def _wait_for(self, safepoint: int) -> None:
        event = self._events[safepoint % len(self._events)]
        # A stop need not wait for work in flight, as later work on the stream does. But before the
        # first event there are copies from host memory that the preparation of the next batch
        # overwrites (attention plans): these must be complete.
        may_cut_short = safepoint > 0
        while not event.query():
            if may_cut_short and self._flag[0] == self.attention[0]:
                return
            time.sleep(_POLL_S)


def device_events(device: str, depth: int) -> list[StreamEvent]:
    """Return the events of a ``RunAheadGate`` on the current device of this kind."""
    module = torch.get_device_module(device)
    return [module.Event() for _ in range(depth + 1)]


def order_behind_pass(scheduler: Any) -> None:
    """Order later work on the schedule stream after the pass of a batch that is dropped.

    Must be called before its requests are released. Under overlap scheduling the pass runs on its
    own stream, while the scheduler prepares batches on another: there it would reuse and overwrite
    memory that the pass still reads (page tables, freed tensors). SGLang
    orders the two streams only after ``run_batch``, and, if the pass ran on graphs, after only a
    part of it. The GPU waits here, the host does not.
    """
    if runs_beside_host(scheduler.device) and scheduler.enable_overlap:
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)
