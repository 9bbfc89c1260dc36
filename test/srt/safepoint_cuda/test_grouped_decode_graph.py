"""When the graph of a decode step that is cut into groups is replayed, and where it stops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.runner_backend import FullCudaGraphBackend

from sglang_coserve.srt import compat
from sglang_coserve.srt.safepoint.placement import why_no_grouped_decode_graphs
from srt.safepoint_cuda.call_graphs import (  # noqa: F401
    LAYERS,
    GraphedModel,
    lone_decode_backend,
    weak_references,
)

SHAPE = "a shape"


class Decode:
    """A captured decode step."""

    def __init__(self) -> None:
        self.model = model = GraphedModel()
        self.backend = lone_decode_backend(torch.cpu, model.cuts)
        self.graph = model.capture()
        self.backend._grouped[SHAPE] = self.graph, "grouped"
        plain = SimpleNamespace(replay=lambda: model.ran.extend(range(LAYERS)))
        self.backend._graphs[SHAPE], self.backend._outputs[SHAPE] = plain, "plain"
        model.ran.clear()

    def replay(self) -> Any:
        return self.backend.replay(SHAPE, None)


def test_only_an_armed_step_replays_the_groups() -> None:
    decode = Decode()
    model, outputs = decode.model, []
    assert decode.replay() == "plain"
    assert model.run_until(decode.graph, None, lambda: outputs.append(decode.replay())) is None
    assert outputs == ["grouped"]
    assert model.ran == [*range(LAYERS), *range(LAYERS)]


@pytest.mark.parametrize(("arrival", "layer"), [(None, 0), (2, 3)])
def test_a_step_stops_before_the_next_group_and_goes_on_there(
    arrival: int | None, layer: int
) -> None:
    decode = Decode()
    model = decode.model
    if arrival is None:
        model.arrived.append("one")
    assert model.run_until(decode.graph, arrival, decode.replay) == layer
    assert model.ran == list(range(layer))
    kept = model.resumption.outputs
    assert decode.replay() == "plain"
    model.ran.clear()
    with model.resumption.resuming(layer, kept):
        assert model.run_until(decode.graph, None, decode.replay) is None
    assert model.ran == list(range(layer, LAYERS))


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


class BeforeGraph:
    init_forward_metadata_in_graph = AttentionBackend.init_forward_metadata_in_graph


class InGraph:
    def init_forward_metadata_in_graph(self, _batch: Any) -> None:
        """Records kernels."""


def model_runner_with(attention: Any) -> Any:
    backend = FullCudaGraphBackend.__new__(FullCudaGraphBackend)
    runner = SimpleNamespace(backend=backend, enable_torch_compile=False, attn_backend=attention)
    args = SimpleNamespace(enable_memory_saver=False)
    return SimpleNamespace(decode_cuda_graph_runner=runner, server_args=args)


@pytest.mark.parametrize(
    ("attention", "prepares_in_graph"),
    [
        (BeforeGraph(), False),
        (InGraph(), True),
        (SimpleNamespace(attn_backend_list=[BeforeGraph(), InGraph()]), True),
        (SimpleNamespace(decode_backend=BeforeGraph()), False),
    ],
)
def test_a_graph_that_begins_with_its_preparation_is_not_grouped(
    attention: Any, prepares_in_graph: bool
) -> None:
    why_not = why_no_grouped_decode_graphs(model_runner_with(attention))
    assert (why_not is not None and "within its graph" in why_not) == prepares_in_graph


def test_graphs_whose_memory_is_lent_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    model_runner = model_runner_with(BeforeGraph())
    assert why_no_grouped_decode_graphs(model_runner) is None
    monkeypatch.setattr(compat, "lends_graph_memory", lambda: True)
    assert "SGLANG_ENABLE_GRAPH_POOL_BORROW" in str(why_no_grouped_decode_graphs(model_runner))
