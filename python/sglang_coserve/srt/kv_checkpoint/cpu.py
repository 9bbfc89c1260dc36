"""Host pool and copy engine for SGLang's hierarchical cache on a machine without CUDA."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from sglang_coserve.srt import compat
from sglang_coserve.srt.device import EMULATED, is_emulated
from sglang_coserve.srt.kv_checkpoint import thread_streams

__all__ = ["CpuHostPool", "EmulatedHostPool", "install_cpu_copies"]


def install_cpu_copies() -> None:
    """Make SGLang's hierarchical cache in this process copy with threads and plain torch.

    Beside an emulated device, with its streams.
    """
    if not is_emulated():
        compat.replace_copy_engine(thread_streams.device_module)
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

    def _stream(self) -> thread_streams.Stream:
        return thread_streams.current_stream()


class EmulatedHostPool(CpuHostPool):
    """The same beside an emulated device: a copy is made at once, and takes what it would take."""

    def _pass_time(self, tokens: float) -> None:
        seconds = tokens * getattr(torch.cpu, EMULATED).copy_s_per_token
        torch.cpu.current_stream().launch(seconds)

    def _stream(self) -> thread_streams.Stream:
        stream: thread_streams.Stream = torch.cpu.current_stream()
        return stream


def _copy(source: Any, from_slots: Any, target: Any, to_slots: Any, layer: int) -> None:
    target[layer].index_copy_(0, to_slots, source[layer].index_select(0, from_slots))
