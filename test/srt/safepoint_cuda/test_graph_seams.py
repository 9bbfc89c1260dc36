"""Safepoints before attention: in a pass without graphs, between pieces, and in compiled code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.runner_backend import (
    BreakableCudaGraphBackend,
    FullCudaGraphBackend,
    TcPiecewiseCudaGraphBackend,
)
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    BreakableCUDAGraph,
    enable_breakable_cuda_graph,
    is_in_breakable_cuda_graph,
)
from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
    enable_tc_piecewise_cuda_graph,
    get_tc_piecewise_forward_context,
    is_in_tc_piecewise_cuda_graph,
    set_tc_piecewise_forward_context,
)

from sglang_coserve.srt.safepoint.flag import PreemptionFlag
from sglang_coserve.srt.safepoint.graph_seams import (
    add_attention_safepoints,
    kinds_without_safepoints,
)
from sglang_coserve.srt.safepoint.grouped_decode_graph import GroupedDecodeBackend
from sglang_coserve.srt.safepoint.in_flight import BatchKind
from sglang_coserve.srt.safepoint.instrument import ForwardPreempted
from sglang_coserve.srt.safepoint.local_gate import LocalGate
from sglang_coserve.srt.safepoint.run_ahead import RunAheadGate
from srt.safepoint_cuda.attending_model import (
    ScalingBackend,
    extend_batch,
    inputs,
    register_cpu_attention,
    some_layers,
)

LAYERS = 6


class PassedEvent:
    """The mark of a device that is always done."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True


@pytest.fixture(scope="module", autouse=True)
def cpu_attention() -> Iterator[None]:
    library = register_cpu_attention()
    yield
    del library


class Pass:
    """A model of attending layers, and what runs a pass of it."""

    def __init__(self, *, interval: int = 2, calls: int = 1, add: bool = True) -> None:
        self.flag = PreemptionFlag()
        self.gate = RunAheadGate(LocalGate(self.flag), self.flag, [PassedEvent(), PassedEvent()])
        self.backend = ScalingBackend()
        self.layers = some_layers(LAYERS, calls)
        self._interval = interval
        if add:
            assert self.add() == LAYERS // interval

    def add(self) -> int:
        return add_attention_safepoints(self.backend, self.layers, self._interval, self.gate)

    @contextmanager
    def contexts(self, pieces: Callable[[], Any] | None = None) -> Iterator[Any]:
        """What SGLang's runners put around a pass; ``pieces`` marks one in pieces of a graph."""
        batch = extend_batch()
        around = nullcontext() if pieces is None else pieces()
        attention_layers = [layer.attn for layer in self.layers]
        within = (
            nullcontext()
            if pieces is None
            else set_tc_piecewise_forward_context(batch, attention_layers, None, [], [])
        )
        with around, forward_context(ForwardContext(attn_backend=self.backend)), within:
            yield batch

    def run(self, pieces: Callable[[], Any] | None = None) -> torch.Tensor:
        x = inputs()
        with self.contexts(pieces) as batch:
            for layer in self.layers:
                x = layer(x, batch)
        return x

    def run_armed(self, batch: int, flagged: bool, run: Callable[[], Any]) -> Any:
        self.gate.arm(batch, 0.0)
        if flagged:
            self.flag.raise_for(batch)
        try:
            return run()
        finally:
            self.flag.lower()
            self.gate.disarm()


PIECES = {
    "no graph": None,
    "breakable": enable_breakable_cuda_graph,
    "piecewise": enable_tc_piecewise_cuda_graph,
}


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_a_pass_ends_before_the_attention_of_a_safepoint(
    pieces: Any, caplog: pytest.LogCaptureFixture
) -> None:
    subject = Pass()
    whole = subject.run(pieces)
    assert subject.backend.attended == list(range(LAYERS))
    torch.testing.assert_close(whole, inputs() * 3.0**LAYERS)

    attend = subject.backend.forward_extend

    def attend_and_arrive(q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        if layer.layer_id == 2:
            subject.flag.raise_for(9)
        return attend(q, k, v, layer, *args, **kwargs)

    subject.backend.forward_extend = attend_and_arrive
    subject.backend.attended.clear()
    with caplog.at_level(logging.ERROR), pytest.raises(ForwardPreempted) as preempted:
        subject.run_armed(9, flagged=False, run=lambda: subject.run(pieces))
    assert preempted.value.layer == 4
    assert subject.backend.attended == [0, 1, 2, 3]
    # To SGLang that is no failure of its graphs, and nothing of the pass is left behind.
    assert not caplog.records
    assert not is_in_breakable_cuda_graph()
    assert not is_in_tc_piecewise_cuda_graph()
    assert get_tc_piecewise_forward_context() is None
    torch.testing.assert_close(subject.run(pieces), whole)


def test_a_layer_that_attends_in_several_calls_is_one_safepoint() -> None:
    subject = Pass(interval=3, calls=3)
    reached: list[int] = []
    subject.gate._gate.reached = reached.append  # type: ignore[method-assign]
    for batch in (1, 2):
        subject.run_armed(batch, flagged=False, run=subject.run)
    assert reached == [0, 3, 0, 3]


def test_every_armed_pass_is_stopped_at_its_first_safepoint() -> None:
    subject = Pass()
    for batch in (1, 2):
        with pytest.raises(ForwardPreempted) as preempted:
            subject.run_armed(batch, flagged=True, run=subject.run)
        assert preempted.value.layer == 0
    assert not subject.backend.attended


def test_compiled_code_is_stopped_and_not_compiled_again() -> None:
    """Safepoints come after SGLang has compiled the model."""
    torch._dynamo.reset()
    subject = Pass(add=False)
    layers, compiles = subject.layers, 0

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        nonlocal compiles
        compiles += 1
        return module.forward

    def forward(x: torch.Tensor, batch: Any) -> torch.Tensor:
        for layer in layers:
            x = layer(x, batch)
        return x

    compiled = torch.compile(forward, fullgraph=True, backend=backend)

    def run() -> torch.Tensor:
        with torch.no_grad(), subject.contexts(enable_tc_piecewise_cuda_graph) as batch:
            return compiled(inputs(), batch)

    whole = run()
    assert compiles == 1
    assert subject.add() == LAYERS // 2
    torch.testing.assert_close(subject.run_armed(1, flagged=False, run=run), whole)
    subject.backend.attended.clear()
    with pytest.raises(ForwardPreempted):
        subject.run_armed(2, flagged=True, run=run)
    assert not subject.backend.attended
    torch.testing.assert_close(run(), whole)
    assert compiles == 1


def test_a_breakable_graph_is_stopped_between_its_segments() -> None:
    """SGLang's graph with segments that compute at once; its replay is the real one."""
    subject = Pass()
    graph = BreakableCUDAGraph()
    replayed: list[int] = []
    state = {"x": inputs()}

    with subject.contexts(enable_breakable_cuda_graph) as batch:
        for number, layer in enumerate(subject.layers):
            graph._segments.append(SimpleNamespace(replay=lambda n=number: replayed.append(n)))
            graph._break_fns.append(
                lambda layer=layer: state.update(x=layer(state["x"], batch)),
            )
        subject.run_armed(1, flagged=False, run=graph.replay)
    assert replayed == list(range(LAYERS))
    torch.testing.assert_close(state["x"], inputs() * 3.0**LAYERS)
    replayed.clear()
    subject.flag.raise_for(2)
    with (
        pytest.raises(ForwardPreempted),
        subject.contexts(enable_breakable_cuda_graph) as batch,
    ):
        subject.run_armed(2, flagged=True, run=graph.replay)
    # The first segment leads to the first layer's attention.
    assert replayed == [0]


# --- What has no safepoints ---------------------------------------------------------------


def runner_with(backend: type | None) -> Any:
    if backend is None:
        return None
    return SimpleNamespace(backend=backend.__new__(backend))


@pytest.mark.parametrize(
    ("prefill", "decode", "kept"),
    [
        (None, None, set()),
        (BreakableCudaGraphBackend, None, set()),
        (TcPiecewiseCudaGraphBackend, GroupedDecodeBackend, set()),
        (BreakableCudaGraphBackend, FullCudaGraphBackend, {BatchKind.DECODE}),
        (FullCudaGraphBackend, None, {BatchKind.EXTEND, BatchKind.MIXED}),
        (FullCudaGraphBackend, FullCudaGraphBackend, set(BatchKind)),
    ],
)
def test_what_replays_a_single_graph_is_never_aborted(
    prefill: type | None, decode: type | None, kept: set[BatchKind]
) -> None:
    model_runner = SimpleNamespace(
        prefill_cuda_graph_runner=runner_with(prefill),
        decode_cuda_graph_runner=runner_with(decode),
    )
    assert set(kinds_without_safepoints(model_runner)) == kept


def test_a_prefill_without_graphs_has_safepoints() -> None:
    """SGLang's eager runner stands there then; it has no backend."""
    model_runner = SimpleNamespace(
        prefill_cuda_graph_runner=SimpleNamespace(), decode_cuda_graph_runner=None
    )
    assert kinds_without_safepoints(model_runner) == {}
