"""Decode steps as one CUDA graph and as one graph per group of layers, without SGLang's engine.

The matrix products of the model's layers are captured by ``GroupedDecodeBackend``, as
the engine would have them captured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from gpu.layer_stack import decoder_layers, stop_delays_ms
from sglang_coserve.srt.safepoint.gates import LeaderGate, PreemptionFlag, device_events

__all__ = ["lone_decode_backend", "measure_decode_graphs"]

_ROWS: Final = 64
_INTERVAL: Final = 4
_REPLAYS: Final = 100
_STOPS: Final = 100


def lone_decode_backend(device_module: Any, cuts: Any, gate: Any) -> Any:
    """Return a ``GroupedDecodeBackend`` without an engine, for one rank."""
    from sglang.srt.runtime_context import get_parallel

    from sglang_coserve.srt.safepoint.placement import GroupedDecodeBackend

    group = SimpleNamespace(barrier=lambda: None)
    model_runner = SimpleNamespace(tp_group=group)  # Where SGLang 0.5.17 looks.
    runner = SimpleNamespace(device_module=device_module, model_runner=model_runner)
    with get_parallel().override(tp_group=group):
        return GroupedDecodeBackend(runner, cuts, gate)


class Variants:
    """A decode step of ``_ROWS`` requests, captured both ways."""

    def __init__(self, model_path: Path) -> None:
        from sglang_coserve.srt.safepoint.graph_cuts import GraphCuts
        from sglang_coserve.srt.safepoint.resumption import Resumption

        self.layers = decoder_layers(model_path)
        self.flag = PreemptionFlag(pinned=True)
        self.gate = LeaderGate(self.flag, device_events("cuda", 1))
        self.x = torch.randn(_ROWS, self.layers[0].hidden, device="cuda", dtype=torch.bfloat16)
        cuts = GraphCuts(self.layers, _INTERVAL, self.gate, Resumption(self.layers))
        self.backend = lone_decode_backend(torch.cuda, cuts, self.gate)
        # What SGLang's runner does before it captures.
        self.backend._pool = torch.cuda.graph_pool_handle()
        self.backend._capture_stream = torch.cuda.Stream()
        before = torch.cuda.memory_allocated()
        with torch.cuda.stream(self.backend._capture_stream):
            self.step()
            self.backend.capture_one("step", self.step)
        torch.cuda.synchronize()
        self.memory_mib = (torch.cuda.memory_allocated() - before) / 2**20

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self) -> torch.Tensor:
        """Launch all layers."""
        x = self.x
        for layer in self.layers:
            x = layer(x)
        return x

    def replay(self) -> torch.Tensor:
        """Replay the whole graph, or the groups if a batch is armed."""
        output: torch.Tensor = self.backend.replay("step", None)
        return output

    def armed(self, batch: int) -> torch.Tensor:
        """Replay the groups."""
        self.gate.arm(batch)
        try:
            return self.replay()
        finally:
            self.gate.disarm()


def measure_decode_graphs(model_path: Path) -> dict[str, Any]:
    """Return the time of a step each way, and from the flag until the device is free.

    Raises:
        RuntimeError: the capture failed, or the groups compute something else.
    """
    variants = Variants(model_path)
    expected = variants.replay().clone()
    torch.cuda.synchronize()
    found = variants.armed(1)
    torch.cuda.synchronize()
    if not torch.equal(found, expected):
        raise RuntimeError("the grouped graphs compute something else than the whole one")
    whole_ms = step_ms(variants.replay)
    grouped_ms = step_ms(lambda: variants.armed(2))
    batches = range(100, 100 + _STOPS)
    delays_ms = sorted(stop_delays_ms(variants.flag, variants.armed, batches, grouped_ms))
    after = variants.armed(10_000)
    torch.cuda.synchronize()
    return {
        "rows": _ROWS,
        "interval": _INTERVAL,
        "whole_ms": whole_ms,
        "grouped_ms": grouped_ms,
        "overhead_share": grouped_ms / whole_ms - 1.0,
        "stops": len(delays_ms),
        "flag_to_free_p50_ms": delays_ms[len(delays_ms) // 2] if delays_ms else None,
        "flag_to_free_max_ms": delays_ms[-1] if delays_ms else None,
        "is_equal_after_stops": bool(torch.equal(after, expected)),
        "captured_mib": variants.memory_mib,
    }


def step_ms(run: Callable[[], object]) -> float:
    """Return the median time of a step; the host waits for the end of each, as for a token."""
    times = []
    for _ in range(_REPLAYS):
        began_s = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began_s) * 1e3)
    return sorted(times)[len(times) // 2]
