"""Host pool and copy engine for SGLang's hierarchical cache on a machine without CUDA.

Streams are threads that run their work in order. They have the interface of ``torch.cuda`` as far
as SGLang's cache controller uses it, so that copies on a CPU are asynchronous as well, with the
same possible failures.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from sglang_coserve.srt import compat
from sglang_coserve.srt.forward_kind import EMULATED, is_emulated

logger = logging.getLogger(__name__)


class ThreadStream:
    """A stream with its own thread, which ends with the process.

    Work that raises breaks the stream: no later work is run, and no later event
    occurs, because a failed copy must never count as complete.
    """

    def __init__(self, **_options: object) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-copies", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Run ``work`` in the thread, after all work submitted before."""
        self._work.put(work)

    def wait_event(self, event: Event) -> None:
        """Let later work wait for the event."""
        if not event.query():
            self.submit(event.synchronize)

    def wait_stream(self, other: object) -> None:
        """Make later work wait for all work submitted to ``other`` so far.

        A PyTorch stream never has pending work on a CPU.
        """
        if isinstance(other, ThreadStream):
            event = Event()
            event.record(other)
            self.wait_event(event)

    def synchronize(self) -> None:
        """Wait until all work is complete; forever if the stream is broken."""
        event = Event()
        event.record(self)
        event.synchronize()

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                work()
            except Exception:
                logger.exception("A KV copy failed: the copy engine stops")
                return


class _CallerStream:
    """The calling thread as a stream, which runs work at once."""

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def wait_event(self, event: Event) -> None:
        event.synchronize()


class Event:
    """An event that occurs when its stream reaches it; unless recorded it counts as occurred."""

    def __init__(self, **_options: object) -> None:
        self._came: threading.Event | None = None
        self._time_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Make the event occur after all work submitted to the stream so far."""
        came = self._came = threading.Event()

        def come() -> None:
            self._time_s = time.perf_counter()
            came.set()

        (stream or current_stream()).submit(come)

    def wait(self, stream: Stream | None = None) -> None:
        """Make later work of ``stream`` wait for the event."""
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        """Return whether the event has occurred."""
        return self._came is None or self._came.is_set()

    def synchronize(self) -> None:
        """Wait for the event."""
        if self._came is not None:
            self._came.wait()

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this event to ``end``; both must have occurred."""
        return (end._time_s - self._time_s) * 1e3


Stream = ThreadStream | _CallerStream
"""Runs work in order."""

_caller_stream = _CallerStream()
_selected = threading.local()


def current_stream() -> Stream:
    """Return the stream selected in this thread; by default the thread itself."""
    selected: Stream = getattr(_selected, "stream", _caller_stream)
    return selected


@contextmanager
def _stream(selected: Stream) -> Iterator[None]:
    previous = current_stream()
    _selected.stream = selected
    try:
        yield
    finally:
        _selected.stream = previous


class _DeviceModule:
    """The part of ``torch.cuda`` that SGLang's cache controller uses."""

    __name__ = "kv_copy_threads"
    Stream = ThreadStream
    Event = Event
    stream = staticmethod(_stream)
    current_stream = staticmethod(current_stream)


device_module = _DeviceModule()
"""Replaces ``torch.cuda`` in SGLang's cache controller."""


def install_cpu_copies() -> None:
    """Make SGLang's hierarchical cache in this process copy with threads and plain torch.

    Beside an emulated device, with its streams.
    """
    if not is_emulated():
        compat.replace_copy_engine(device_module)
    kind = EmulatedHostPool if is_emulated() else CpuHostPool
    compat.replace(
        "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler.get_mha_host_pool_cls",
        lambda _device_pool: kind,
    )
    # SGLang reserves 10 GiB of host memory; here device and host share one, often small, memory.
    compat.replace("sglang.srt.mem_cache.pool_host.base.HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)


class CpuHostPool(MHATokenToKVPoolHost):
    """SGLang's host pool in ordinary memory, with copies done by the selected stream's thread.

    Supports only the layout ``layer_first``: K and V of shape (layers, slots, heads, head size).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "pin_memory": False})
        assert self.layout == "layer_first"

    def init_kv_buffer(self) -> torch.Tensor:
        """Return memory for K and V; as in the base class, but not pinned."""
        self.token_stride_size = self.head_num * self.head_dim * self.dtype.itemsize
        self.layout_dim = self.token_stride_size * self.layer_num
        shape = (2, self.layer_num, self.size, self.head_num, self.head_dim)
        # Touch all pages now. Page faults would otherwise make the first copies ten times slower,
        # and online requests may wait for them.
        return torch.empty(shape, dtype=self.dtype, device=self.device).zero_()

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: Any, device_indices: Any, _io_backend: str
    ) -> None:
        """Copy the slots of all layers to host memory, in the selected stream."""

        def copy() -> None:
            self._pass_time(len(host_indices))
            for layer in range(self.layer_num):
                _copy(device_pool.k_buffer, device_indices, self.k_buffer, host_indices, layer)
                _copy(device_pool.v_buffer, device_indices, self.v_buffer, host_indices, layer)

        self._stream().submit(copy)

    def load_to_device_per_layer(
        self,
        device_pool: Any,
        host_indices: Any,
        device_indices: Any,
        layer_id: int,
        _io_backend: str,
        **_options: Any,
    ) -> None:
        """Copy the slots of one layer to the device, in the selected stream."""

        def copy() -> None:
            self._pass_time(len(host_indices) / self.layer_num)
            _copy(self.k_buffer, host_indices, device_pool.k_buffer, device_indices, layer_id)
            _copy(self.v_buffer, host_indices, device_pool.v_buffer, device_indices, layer_id)

        self._stream().submit(copy)

    def _pass_time(self, tokens: float) -> None:
        """Let a copy of so many tokens take longer than it does."""

    def _stream(self) -> Stream:
        return current_stream()


class EmulatedHostPool(CpuHostPool):
    """The same beside an emulated device: a copy is made at once, and takes what it would take."""

    def _pass_time(self, tokens: float) -> None:
        seconds = tokens * getattr(torch.cpu, EMULATED).copy_s_per_token
        torch.cpu.current_stream().launch(seconds)

    def _stream(self) -> Stream:
        stream: Stream = torch.cpu.current_stream()
        return stream


def _copy(source: Any, from_slots: Any, target: Any, to_slots: Any, layer: int) -> None:
    target[layer].index_copy_(0, to_slots, source[layer].index_select(0, from_slots))
