"""SGLang's breakable graphs without a GPU: their pieces are calls instead of CUDA graphs.

Layers work in place on one tensor, as graphs do on memory that they share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
)
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    breakable_cuda_graph as breakable,
)
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sglang_coserve.srt.safepoint.gates import LeaderGate
from sglang_coserve.srt.safepoint.graph_cuts import GraphCuts
from sglang_coserve.srt.safepoint.instrument import ForwardPreempted, Gate, Resumption
from sglang_coserve.srt.safepoint.placement import GroupedDecodeBackend

LAYERS, INTERVAL, WIDTH = 8, 3, 4


class Calls:
    """A piece."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def replay(self) -> None:
        for call in self.calls:
            call()


class CallCapture(BreakableCUDAGraphCapture):
    """Captures calls."""

    def _begin_new_segment(self) -> None:
        self._current_graph = Calls()

    def _end_current_segment(self) -> None:
        self.cuda_graph._segments.append(self._current_graph)
        self._current_graph = None


class Layer(nn.Module):
    """Changes its input and the residual in place; what it computes depends on both."""

    def __init__(self, number: int, ran: list[int]) -> None:
        super().__init__()
        self.number, self.ran = number, ran

    def forward(self, positions: Any, x: torch.Tensor, residual: torch.Tensor) -> Any:
        capture = breakable._current_capture_var.get()
        if capture is None:
            self._compute(x, residual)
        else:
            capture._current_graph.calls.append(lambda: self._compute(x, residual))
        return x, residual

    def _compute(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        self.ran.append(self.number)
        residual.add_(x)
        x.mul_(0.5).add_(residual * (self.number + 1))


class GraphedModel:
    """A model whose graph has cuts, and what it computes in ``x``."""

    def __init__(self, gate: Gate | None = None) -> None:
        self.arrived: list[Any] = []
        self.gate = gate or LeaderGate(lambda: self.arrived)
        self.ran: list[int] = []
        self.layers = [Layer(number, self.ran) for number in range(LAYERS)]
        self.resumption = Resumption(self.layers, INTERVAL, self.gate)
        self.cuts = GraphCuts(self.layers, INTERVAL, self.gate, self.resumption)
        self.x, self.residual = torch.zeros(WIDTH), torch.zeros(WIDTH)

    def forward(self) -> torch.Tensor:
        x, residual = self.x, self.residual
        for layer in self.layers:
            x, residual = layer(None, x, residual)
        return x

    def load(self, seed: int) -> None:
        """Put the inputs of a batch into place."""
        self.x.copy_(torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed)))
        self.residual.zero_()

    def capture(self) -> BreakableCUDAGraph:
        graph = BreakableCUDAGraph()
        with self.cuts.placed(), CallCapture(graph):
            self.forward()
        return graph

    def run_until(self, graph: Any, arrival: int | None, run: Callable[[], Any]) -> int | None:
        """Run an armed batch, for which something arrives in this layer; return where it stops."""
        segment = graph._segments[0 if arrival is None else arrival // INTERVAL]
        arrive = lambda: self.arrived.append("one")  # noqa: E731
        if arrival is not None:
            segment.calls.insert(arrival % INTERVAL, arrive)
        self.gate.arm(1)
        try:
            run()
        except ForwardPreempted as stop:
            return stop.layer
        finally:
            self.gate.disarm()
            self.arrived.clear()
            if arrival is not None:
                segment.calls.remove(arrive)
        return None


@pytest.fixture(autouse=True)
def weak_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang makes them on devices with graphs only."""
    monkeypatch.setattr(breakable, "_weak_ref_if_tensor", lambda value: value)


@pytest.fixture(autouse=True)
def group_of_ranks() -> Iterator[None]:
    """Let backends find one in the process, where SGLang looks for it since 0.5.22."""
    with get_parallel().override(tp_group=None):
        yield


def lone_decode_backend(device_module: Any, cuts: Any) -> Any:
    """Return decode graphs in groups of layers for one rank, without an engine."""
    group = SimpleNamespace(barrier=lambda: None)
    model_runner = SimpleNamespace(tp_group=group)  # Where SGLang 0.5.17 looks.
    runner = SimpleNamespace(device_module=device_module, model_runner=model_runner)
    with get_parallel().override(tp_group=group):
        return GroupedDecodeBackend(runner, cuts)
