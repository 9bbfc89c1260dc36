"""A replay that stops between groups of layers, and goes on after others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.runner_backend import (
    BreakableCudaGraphBackend,
    FullCudaGraphBackend,
    TcPiecewiseCudaGraphBackend,
)

from sglang_coserve.errors import StartupError
from sglang_coserve.srt import compat
from sglang_coserve.srt.safepoint.placement import (
    CutPrefillBackend,
    cut_prefill_graphs,
    why_prefills_cannot_stop,
)
from srt.safepoint_cuda.call_graphs import (  # noqa: F401
    INTERVAL,
    LAYERS,
    WIDTH,
    GraphedModel,
    group_of_ranks,
    weak_references,
)


def whole(model: GraphedModel, graph: Any, seed: int) -> torch.Tensor:
    model.load(seed)
    model.cuts.replay(graph)
    return model.x.clone()


def test_a_graph_is_cut_before_each_group_but_the_first() -> None:
    model = GraphedModel()
    own = [layer.forward for layer in model.layers]
    graph = model.capture()
    assert [layer.forward for layer in model.layers] == own
    assert [len(segment.calls) for segment in graph._segments] == [3, 3, 2]
    model.load(1)
    model.ran.clear()
    eager = model.forward().clone()
    model.ran.clear()
    torch.testing.assert_close(whole(model, graph, 1), eager)
    assert model.ran == list(range(LAYERS))


@pytest.mark.parametrize(("arrival", "layer"), [(0, 3), (2, 3), (3, 6), (5, 6)])
def test_it_goes_on_from_the_cut_with_what_was_there(arrival: int, layer: int) -> None:
    model = GraphedModel()
    graph = model.capture()
    expected, other = whole(model, graph, 1), whole(model, graph, 2)
    model.ran.clear()
    model.load(1)
    assert model.run_until(graph, arrival, lambda: model.cuts.replay(graph)) == layer
    kept = model.resumption.outputs
    torch.testing.assert_close(whole(model, graph, 2), other)
    # Attention, positions and the like are prepared again; the layers' inputs are not.
    model.load(1)
    with model.resumption.resuming(layer, kept):
        assert model.run_until(graph, None, lambda: model.cuts.replay(graph)) is None
    torch.testing.assert_close(model.x, expected)
    assert model.ran == [*range(layer), *range(LAYERS), *range(layer, LAYERS)]


def test_it_may_stop_twice_and_at_once() -> None:
    model = GraphedModel()
    graph = model.capture()
    expected = whole(model, graph, 1)
    model.ran.clear()
    model.load(1)

    def replay() -> None:
        model.cuts.replay(graph)

    assert model.run_until(graph, 0, replay) == INTERVAL
    kept = model.resumption.outputs
    model.resumption.outputs = None
    whole(model, graph, 2)
    with model.resumption.resuming(INTERVAL, kept):
        model.arrived.append("one")
        assert model.run_until(graph, None, replay) == INTERVAL
        assert model.resumption.outputs is None  # What was kept is still to be used.
    with model.resumption.resuming(INTERVAL, kept):
        assert model.run_until(graph, 4, replay) == 2 * INTERVAL
        kept = model.resumption.outputs
    whole(model, graph, 3)
    with model.resumption.resuming(2 * INTERVAL, kept):
        assert model.run_until(graph, None, replay) is None
    torch.testing.assert_close(model.x, expected)


def test_what_stopped_without_a_graph_is_kept_from_the_runner_of_graphs() -> None:
    model = GraphedModel()
    graph = model.capture()
    runner = SimpleNamespace(can_run_graph=lambda batch: batch == "fits")
    model.cuts.guard(runner)
    assert (runner.can_run_graph("fits"), runner.can_run_graph("too long")) == (True, False)
    with model.resumption.resuming(INTERVAL, (model.x, model.residual)):
        assert not runner.can_run_graph("fits")
    model.load(1)
    assert model.run_until(graph, 0, lambda: model.cuts.replay(graph)) == INTERVAL
    with model.resumption.resuming(INTERVAL, model.resumption.outputs):
        assert runner.can_run_graph("fits")


def test_what_a_layer_owes_is_done_before_a_cut() -> None:
    boundary = pytest.importorskip("sglang.srt.layers.layer_boundary.output", reason="since 0.5.22")
    from sglang.srt.layers.layer_boundary.residual.add_norm import PLAIN_ADD
    from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    class Experts(boundary.DeferredFinalize, frozen=True):
        def complete(self) -> torch.Tensor:
            return torch.full((WIDTH,), 2.0)

    model, seen = GraphedModel(), []
    model.layers[INTERVAL].forward = lambda *arguments, **_: seen.append(arguments)
    batch = ForwardBatch.__new__(ForwardBatch)
    batch.residual_stream = ResidualStream(torch.ones(WIDTH))
    handle = batch.residual_stream.record(Experts(), PLAIN_ADD)
    with model.cuts.placed():
        model.layers[INTERVAL](None, handle, forward_batch=batch)
    ((_, hidden),) = seen
    assert hidden.tolist() == [2.0] * WIDTH
    batch.residual_stream.check(hidden)
    assert [each.tolist() for each in compat.tensors_beside([batch])] == [
        [1.0] * WIDTH,
        [2.0] * WIDTH,
    ]
    batch.residual_stream.transport = (None, None)
    with model.cuts.placed(), pytest.raises(StartupError, match="--safepoint-interval"):
        model.layers[INTERVAL](None, hidden, forward_batch=batch)


# --- Prefills -----------------------------------------------------------------------------


def runner_with(backend: Any, **runner: Any) -> Any:
    args = SimpleNamespace(debug_cuda_graph=False, enable_memory_saver=False)
    model_runner = SimpleNamespace(server_args=args, tp_group=None)
    model_runner.prefill_cuda_graph_runner = (
        None
        if backend is None
        else SimpleNamespace(
            backend=backend, model_runner=model_runner, device_module=torch.cpu, **runner
        )
    )
    return model_runner


def test_prefill_graphs_are_captured_again() -> None:
    events: list[str] = []
    model = GraphedModel()
    backend = BreakableCudaGraphBackend.__new__(BreakableCudaGraphBackend)
    backend.cleanup = lambda: events.append("cleanup")  # type: ignore[method-assign]
    model_runner = runner_with(
        backend, capture=lambda: events.append("capture"), can_run_graph=lambda _: True
    )
    cut_prefill_graphs(model_runner, model.cuts)
    assert events == ["cleanup", "capture"]
    cut = model_runner.prefill_cuda_graph_runner.backend
    assert isinstance(cut, CutPrefillBackend)
    cut._graphs["shape"], cut._outputs["shape"] = model.capture(), "output"
    model.load(1)
    model.ran.clear()
    assert cut.replay("shape", None) == "output"
    assert model.ran == list(range(LAYERS))
    cut.cleanup()
    assert not model.cuts._places


@pytest.mark.parametrize("runner", [None, SimpleNamespace()], ids=["no graphs", "eager runner"])
def test_prefills_without_graphs_are_left_alone(runner: Any) -> None:
    model_runner = runner_with(None)
    model_runner.prefill_cuda_graph_runner = runner
    cut_prefill_graphs(model_runner, GraphedModel().cuts)
    assert model_runner.prefill_cuda_graph_runner is runner


@pytest.mark.parametrize(
    ("backend", "stops"),
    [
        (None, True),
        (BreakableCudaGraphBackend, True),
        (TcPiecewiseCudaGraphBackend, False),
        (FullCudaGraphBackend, False),
    ],
)
def test_prefills_that_run_as_one_piece_are_told_apart(backend: Any, stops: bool) -> None:
    made = None if backend is None else backend.__new__(backend)
    assert (why_prefills_cannot_stop(runner_with(made)) is None) == stops


def test_prefills_whose_memory_is_lent_cannot_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_GRAPH_POOL_BORROW", "1")
    if not compat.lends_graph_memory():
        pytest.skip("this SGLang lends none")
    runner = runner_with(BreakableCudaGraphBackend.__new__(BreakableCudaGraphBackend))
    assert "SGLANG_ENABLE_GRAPH_POOL_BORROW" in str(why_prefills_cannot_stop(runner))
