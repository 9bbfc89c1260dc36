"""Gates say at a safepoint whether the pass stops: for whom, when, and on all ranks alike.

The host launches a forward pass faster than a GPU computes it. When an online request arrives,
the remaining layers would be in the stream already, from which they cannot be removed, so a check
on the host alone would be useless. Therefore at every safepoint of an armed
batch the host records an event, and waits until the GPU is close behind.

Kernels that were launched run to their end, also after the pass has stopped. The host knows where
it stopped: it keeps the outputs of the last layer, whether computed yet or not, and the steps
that run meanwhile are launched later on the same stream. Only a dropped batch releases memory
to others; see ``order_behind_pass``.

Tensor-parallel ranks stop before the same layer: if only some stopped, the others would hang in a
collective operation. ConServe broadcasts at every safepoint. Here rank 0 writes its progress, and
whether it stops, to memory shared by all ranks of a machine, and the others wait at a safepoint
until rank 0 has reached it. No message to rank 0 is needed while a pass goes on: up to that layer
all ranks have run the same collectives, so rank 0 is at most one safepoint ahead. Where the pass
stops, nothing holds rank 0 back any more, and the words of its next batches would overwrite what
a late rank has yet to read: rank 0 waits until each has seen the stop. The next step needs all of
them anyway. The words are written in one order and
read in the opposite order, without barriers, which relies on a processor that does not reorder
stores (x86).
"""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.srt.forward_kind import runs_ahead
from sglang_coserve.srt.safepoint.instrument import (
    FOR_ANYBODY,
    ForwardPreempted,
    Gate,
    Stops,
)

_POLL_S: Final = 50e-6
"""Sleep between two looks at an event and at what has arrived; a group of layers takes
milliseconds."""

_LARGEST_ID = 2**31 - 1


def batch_id(forward_count: int) -> int:
    """Return a batch's id for a gate: a positive int32, reused only after 2³¹ - 1 batches."""
    return 1 + forward_count % _LARGEST_ID


class LeaderGate(Gate):
    """Stops the armed batch when online requests have come that it must stop for, or its time is
    up.

    A group of layers is not begun if it would end after the deadline, assuming that it takes as
    long as the group before it. The first group of a pass always runs.

    With events the host waits for the device: work after the i-th safepoint is launched only once
    the device has passed the (i - depth)-th. So at most ``depth`` + 1 groups of layers are
    outstanding, and the pass has stopped when these have run. With depth 0 the device idles at
    every safepoint while the host launches the next group; with depth 1 it has one group to
    compute meanwhile.
    """

    def __init__(
        self,
        arrivals: Callable[[], Sequence[RequestInfo]],
        events: Sequence[Any] = (),
        publish: Callable[[int, int, bool], None] | None = None,
    ) -> None:
        """Create a gate.

        Args:
            arrivals: Returns the online requests that have come and are in no batch yet.
            events: depth + 1 of them, such as ``torch.cuda.Event``; none if the host waits for the
                device anyway.
            publish: Tells the other ranks the batch, the layer that was reached, and whether the
                pass stops there.
        """
        super().__init__()
        self._arrivals = arrivals
        self._events = tuple(events)
        self._publish = publish
        self._num_considered = self._passed = 0
        self._last_s: float | None = None

    def arm(self, batch: int, stops: Stops = FOR_ANYBODY) -> None:
        """See ``Gate.arm``."""
        self._last_s, self._num_considered, self._passed = None, 0, 0
        super().arm(batch, stops)

    def reached(self, layer: int) -> None:
        """See ``Gate.reached``."""
        if self._events:
            self._stay_close()
        stops, now_s = self._is_awaited(), time.perf_counter()
        if self._last_s is not None:
            groups_s = max(len(self._events), 1) * (now_s - self._last_s)
            stops = stops or now_s + groups_s > self._stops.until_s
        self._last_s = now_s
        if self._publish is not None:
            self._publish(self.attention[0], layer, stops)
        if stops:
            raise ForwardPreempted(layer)

    def _is_awaited(self) -> bool:
        """Return whether the batch must stop for who has come; asks once for each new arrival."""
        if not self.stops_for and len(arrivals := self._arrivals()) > self._num_considered:
            self._num_considered = len(arrivals)
            if self._stops.for_arrivals(arrivals, time.perf_counter()):
                self.stops_for = arrivals
        return bool(self.stops_for)

    def _stay_close(self) -> None:
        """Record an event, and wait for that of ``depth`` safepoints before."""
        here, self._passed = self._passed, self._passed + 1
        depth = len(self._events) - 1
        self._events[here % len(self._events)].record()
        if here or not depth:
            self._wait_for(max(here - depth, 0))

    def _wait_for(self, safepoint: int) -> None:
        event = self._events[safepoint % len(self._events)]
        # A stop need not wait for work in flight, as later work on the stream does. But before the
        # first event there are copies from host memory that the preparation of the next batch
        # overwrites (attention plans): these must be complete.
        may_cut_short = safepoint > 0
        while not event.query():
            if may_cut_short and self._is_awaited():
                return
            time.sleep(_POLL_S)


def device_events(device: str, depth: int) -> list[Any]:
    """Return the events of a ``LeaderGate`` on the current device of this kind."""
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
    if runs_ahead(scheduler):
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)


_PROGRESS, _STOP, _SEEN = 0, 8, 16
"""Indices of the words, each on its own cache line. The last stop that a follower has seen stands
from ``_SEEN`` on, with a cache line for each follower."""

_SIZE_BYTES: Final = 4096
_STEPS: Final = 1 << 12
"""More than the number of layers of any model."""

_SPINS: Final = 200
_FIRST_SLEEP_S: Final = 20e-6
_LONGEST_SLEEP_S: Final = 2e-4


def has_ordered_stores() -> bool:
    """Return whether this processor makes stores visible in program order."""
    return platform.machine().lower() in ("x86_64", "amd64")


_TIMEOUT_S: Final = 120.0
"""Longest wait for another rank, after which an error ends the server."""


def _wait_until(has_come: Callable[[], bool], timeout_s: float, longest_sleep_s: float) -> bool:
    """Return whether something comes in time. Spins briefly, since ranks are rarely apart; then
    sleeps with increasing intervals."""
    for _ in range(_SPINS):
        if has_come():
            return True
    deadline_s = time.perf_counter() + timeout_s
    sleep_s = _FIRST_SLEEP_S
    while not has_come():
        if time.perf_counter() > deadline_s:
            return False
        time.sleep(sleep_s)
        sleep_s = min(2 * sleep_s, longest_sleep_s)
    return True


class SharedWords:
    """64-bit words in memory that the ranks of a machine share."""

    def __init__(self, file: int, followers: int = 0, *, timeout_s: float = _TIMEOUT_S) -> None:
        """Map an open file, which may be closed and unlinked afterwards.

        Rank 0 waits at most ``timeout_s`` for the ranks 1 to ``followers``.
        """
        self._map = mmap.mmap(file, _SIZE_BYTES)
        self.words = memoryview(self._map).cast("q")
        self._followers = range(1, followers + 1)
        self._timeout_s = timeout_s

    def publish(self, batch: int, layer: int, stops: bool) -> None:
        """Tell the other ranks how far rank 0 is, and whether it stops there; wait until all have
        seen a stop.

        Raises:
            RuntimeError: one of them does not get there in time.
        """
        step = batch * _STEPS + layer
        if stops:
            self.words[_STOP] = step
        self.words[_PROGRESS] = step
        if stops:
            self._await_followers(step)

    def saw_stop(self, rank: int, step: int) -> None:
        """Tell rank 0 that this rank stops at ``step``, too."""
        self.words[_seen_by(rank)] = step

    def _await_followers(self, step: int) -> None:
        for rank in self._followers:
            has_seen = partial(self._has_seen, rank, step)
            if not _wait_until(has_seen, self._timeout_s, _LONGEST_SLEEP_S):
                raise RuntimeError(
                    f"rank {rank} did not reach layer {step % _STEPS} of batch {step // _STEPS} "
                    f"within {self._timeout_s:.0f} s: it hangs or has died"
                )

    def _has_seen(self, rank: int, step: int) -> bool:
        return bool(self.words[_seen_by(rank)] == step)


def _seen_by(rank: int) -> int:
    return _SEEN + 8 * (rank - 1)


def share_words(group: Any, rank: int) -> SharedWords:
    """Return the same words on every rank of the CPU group ``group``; all of them must call it.

    The file is unlinked as soon as all ranks have opened it, so a crash leaves nothing behind.
    """
    distributed = torch.distributed
    leader = distributed.get_global_rank(group, 0)
    path: list[str | None] = [None]
    if rank == 0:
        directory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        file, path[0] = tempfile.mkstemp(prefix="coserve-safepoints-", dir=directory)
        os.ftruncate(file, _SIZE_BYTES)
    distributed.broadcast_object_list(path, src=leader, group=group)
    assert path[0] is not None
    if rank != 0:
        file = os.open(path[0], os.O_RDWR)
    try:
        words = SharedWords(file, distributed.get_world_size(group) - 1)
        distributed.barrier(group=group)
    finally:
        os.close(file)
        if rank == 0:
            Path(path[0]).unlink()
    return words


class FollowerGate(Gate):
    """The gate of the other ranks: waits until rank 0 is as far, and follows its decision."""

    def __init__(
        self,
        shared: SharedWords,
        rank: int = 1,
        *,
        timeout_s: float = _TIMEOUT_S,
        longest_sleep_s: float = 1e-3,
    ) -> None:
        """``timeout_s`` bounds the wait for rank 0, after which an error ends the server,
        ``longest_sleep_s`` the sleep between two looks."""
        super().__init__()
        self._shared = shared
        self._rank = rank
        self._words = shared.words
        self._timeout_s = timeout_s
        self._longest_sleep_s = longest_sleep_s

    def reached(self, layer: int) -> None:
        """See ``Gate.reached``.

        Raises:
            RuntimeError: rank 0 does not get there in time.
        """
        step = self.attention[0] * _STEPS + layer
        if not self._has_come(step):
            self._wait_for(step)
        if self._words[_STOP] == step:
            self._shared.saw_stop(self._rank, step)
            raise ForwardPreempted(layer)

    def _wait_for(self, step: int) -> None:
        if not _wait_until(lambda: self._has_come(step), self._timeout_s, self._longest_sleep_s):
            raise RuntimeError(
                f"rank 0 did not reach layer {step % _STEPS} of batch {step // _STEPS} within "
                f"{self._timeout_s:.0f} s: it hangs or has died"
            )

    def _has_come(self, step: int) -> bool:
        """Return whether rank 0 is at this safepoint or beyond it.

        Rank 0 may already be in the next batch, at an earlier layer: steps grow with batches.
        """
        return 0 <= self._words[_PROGRESS] - step < _STEPS
