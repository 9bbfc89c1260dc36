"""How a decode graph is cut into groups, and when the cut one is replayed.

The capture is SGLang's own but for its segments: instead of CUDA graphs they hold calls.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
)
from torch import nn

from sglang_coserve.srt.safepoint.flag import PreemptionFlag
from sglang_coserve.srt.safepoint.grouped_decode_graph import (
    GroupedDecodeBackend,
    why_no_grouped_decode_graphs,
)
from sglang_coserve.srt.safepoint.instrument import ForwardPreempted
from sglang_coserve.srt.safepoint.local_gate import LocalGate
from sglang_coserve.srt.safepoint.run_ahead import RunAheadGate
from srt.safepoint_cuda.device_thread import DeviceEvent, DeviceThread

LAYERS, INTERVAL, SHAPE = 8, 3, "a shape"


class Calls:
    """A segment."""

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
    def __init__(self, number: int, ran: list[int]) -> None:
        super().__init__()
        self.number, self.ran = number, ran
        self.capture: CallCapture | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.capture is not None
        self.capture._current_graph.calls.append(lambda: self.ran.append(self.number))
        return x


@pytest.fixture
def device() -> Any:
    thread = DeviceThread()
    yield thread
    thread.close()


class Decode:
    """A captured decode step."""

    def __init__(self, device: DeviceThread) -> None:
        self.flag = PreemptionFlag()
        events = [DeviceEvent(device), DeviceEvent(device)]
        self.gate = RunAheadGate(LocalGate(self.flag), self.flag, events)
        self.ran: list[int] = []
        layers = [Layer(number, self.ran) for number in range(LAYERS)]
        runner = SimpleNamespace(
            device_module=torch.cpu, model_runner=SimpleNamespace(tp_group=None)
        )
        self.backend = GroupedDecodeBackend(runner, layers, INTERVAL, self.gate)
        graph = BreakableCUDAGraph()
        with self.backend._cut(), CallCapture(graph) as capture:
            for layer in layers:
                layer.capture = capture
                layer(torch.empty(0))
        assert not any("forward" in vars(layer) for layer in layers)
        self.backend._grouped[SHAPE] = graph, "grouped"
        plain = SimpleNamespace(replay=lambda: self.ran.extend(range(LAYERS)))
        self.backend._graphs[SHAPE], self.backend._outputs[SHAPE] = plain, "plain"
        self.graph = graph

    def replay(self, batch: int) -> Any:
        """Replay an armed step."""
        self.gate.arm(batch, 0.0)
        try:
            return self.backend.replay(SHAPE, None)
        finally:
            self.gate.disarm()


def test_a_graph_is_cut_before_each_group(device: DeviceThread) -> None:
    decode = Decode(device)
    assert [len(segment.calls) for segment in decode.graph._segments] == [3, 3, 2]
    assert len(decode.graph._break_fns) == 2


def test_only_an_armed_step_replays_the_groups(device: DeviceThread) -> None:
    decode = Decode(device)
    assert decode.backend.replay(SHAPE, None) == "plain"
    assert decode.replay(batch=1) == "grouped"
    assert decode.ran == [*range(LAYERS), *range(LAYERS)]


@pytest.mark.parametrize(("arrival", "layer"), [(None, 0), (0, 3), (2, 3), (3, 6)])
def test_a_step_ends_before_the_next_group(
    device: DeviceThread, arrival: int | None, layer: int
) -> None:
    decode = Decode(device)
    if arrival is None:
        decode.flag.raise_for(1)
    else:
        calls = decode.graph._segments[arrival // INTERVAL].calls
        calls.insert(arrival % INTERVAL, lambda: decode.flag.raise_for(1))
    with pytest.raises(ForwardPreempted) as preempted:
        decode.replay(batch=1)
    assert preempted.value.layer == layer
    assert decode.ran == list(range(layer))
    decode.flag.lower()
    decode.ran.clear()
    assert decode.backend.replay(SHAPE, None) == "plain"


def test_layers_keep_a_forward_of_their_own(device: DeviceThread) -> None:
    decode = Decode(device)
    layer = decode.backend._cut_layers[INTERVAL]
    own = layer.forward = lambda x: x
    with decode.backend._cut():
        assert layer.forward is not own
    assert layer.forward is own


@pytest.mark.parametrize(
    ("runner", "reason"),
    [
        (None, "without CUDA graphs"),
        (SimpleNamespace(backend=SimpleNamespace()), "captured by SimpleNamespace"),
    ],
)
def test_what_cannot_be_captured_in_groups_says_why(runner: Any, reason: str) -> None:
    model_runner = SimpleNamespace(decode_cuda_graph_runner=runner)
    assert reason in str(why_no_grouped_decode_graphs(model_runner))
