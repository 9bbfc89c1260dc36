"""Keeps the host from running ahead of the GPU in a batch that may be suspended.

The host launches a pass faster than the GPU computes it. When an online request arrives,
the layers that are left would be in the stream already, and nothing comes back out of a
stream: a check on the host alone would stop nothing. So at every safepoint of an armed
batch the host records an event, and waits until the GPU has come close.

What was launched runs to its end, also after the pass has stopped. Where it stops is known on
the host: what its last layer returns is kept, whether it is computed yet or not, and the
steps that run meanwhile are launched later on the same stream. Only a batch that is dropped
gives memory to others; see ``order_behind_pass``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch

from sglang_coserve.srt.safepoint.flag import PreemptionFlag
from sglang_coserve.srt.safepoint.instrument import Gate

__all__ = ["Event", "RunAheadGate", "cuda_events", "order_behind_pass"]

_POLL_S: Final = 50e-6
"""Sleep between two looks at an event: spinning would keep Python's lock from the thread that
receives requests, and a group of layers takes milliseconds."""


class Event(Protocol):
    """A mark in the stream of the device; ``torch.cuda.Event`` is one."""

    def record(self) -> None:
        """Set the mark behind all that was launched so far; a former one is forgotten."""
        ...

    def query(self) -> bool:
        """Return whether the device has passed the mark."""
        ...


class RunAheadGate:
    """A gate at which the host waits for the device, before it asks another gate.

    Before what follows the i-th safepoint is launched, the device has passed the
    (i - depth)-th. So at most ``depth`` + 1 groups of layers are outstanding, and the pass
    has stopped when these have run. With depth 0 the device idles at every safepoint while
    the host launches the next group; with depth 1 it has a group to compute meanwhile.
    """

    def __init__(self, gate: Gate, flag: PreemptionFlag, events: Sequence[Event]) -> None:
        """``gate`` decides; ``flag`` is the one it decides by; ``events`` are depth + 1."""
        # Asked at every safepoint of an armed batch, not only when the flag is raised.
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
        """See ``Gate.reached``. The other gate is asked once, as ranks that follow need it."""
        here, self._passed = self._passed, self._passed + 1
        self._events[here % len(self._events)].record()
        if here or not self.depth:
            self._wait_for(max(here - self.depth, 0))
        self._gate.reached(layer)

    def _wait_for(self, safepoint: int) -> None:
        event = self._events[safepoint % len(self._events)]
        # What is in flight is waited for by whoever needs it, so a stop need not wait. But
        # before the first event there are copies from host memory that preparing the next batch
        # overwrites (attention plans): these must be done.
        may_cut_short = safepoint > 0
        while not event.query():
            if may_cut_short and self._flag[0] == self.attention[0]:
                return
            time.sleep(_POLL_S)


def cuda_events(depth: int) -> list[Event]:
    """Return the events of a ``RunAheadGate`` on the current CUDA device."""
    return [torch.cuda.Event() for _ in range(depth + 1)]


def order_behind_pass(scheduler: Any) -> None:
    """Let all that is done to a dropped batch from now on follow what was launched of it.

    Call it before the batch is rolled back. Under overlap scheduling the pass runs on a stream
    of its own, and the scheduler prepares batches on another: there it would hand out again,
    and overwrite, what the pass still reads (page tables, tensors that are freed). SGLang
    orders the two only after ``run_batch``, and, if the pass ran on graphs, behind less than
    the whole pass. The GPU waits here, the host does not.
    """
    if scheduler.device == "cuda" and scheduler.enable_overlap:
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)
