"""Cuts CUDA graphs before groups of layers, so that a replay can stop there and be resumed later.

SGLang's breakable graphs are pieces with Python calls between them. A cut is one more such
call, which gets the inputs of the next layer. A replay that stops at a cut keeps a copy of these
tensors, since other replays use the same memory; a resumed replay restores them, and replays the
pieces after the cut. State that a model passes from layer to layer other than through arguments
and what SGLang keeps for it (``compat.tensors_beside``) would be lost, as it would be without
graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    BreakableCUDAGraph,
    eager_on_graph,
)
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    breakable_cuda_graph as breakable,
)
from torch import nn

from sglang_coserve.srt import compat
from sglang_coserve.srt.safepoint.instrument import ForwardPreempted, Gate, Resumption


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Copies of the input tensors of a layer."""

    tensors: tuple[torch.Tensor, ...]


class GraphCuts:
    """The cuts of all graphs of one kind, each a safepoint before every ``interval``-th layer."""

    def __init__(
        self, layers: Sequence[nn.Module], interval: int, gate: Gate, resumption: Resumption
    ) -> None:
        self._layers = {number: layers[number] for number in range(interval, len(layers), interval)}
        self._gate = gate
        self._resumption = resumption
        self._places: dict[BreakableCUDAGraph, dict[int, int]] = {}
        """For each graph, by layer: index of the graph's break that is the cut before it."""

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Cut breakable graphs captured in this context before each group except the first."""
        with ExitStack() as restored:
            for number, layer in self._layers.items():
                own = vars(layer).get("forward")
                layer.forward = self._cut_before(number, layer.forward)
                restored.callback(_restore, layer, own)
            yield

    @property
    def are_in_use(self) -> bool:
        """Whether the running batch may stop at a cut, as a resumed one may, too."""
        return bool(self._gate.attention[0])

    def guard(self, runner: Any) -> None:
        """Let SGLang's runner of these graphs leave a batch alone that stopped without a graph.

        It goes on without one, whatever else would let it run in one.
        """
        can_run_graph = runner.can_run_graph

        def can_go_on_in_a_graph(forward_batch: Any) -> bool:
            stopped_in_one = isinstance(self._resumption.resumed, _Inputs)
            may_run = stopped_in_one or self._resumption.first == 0
            return bool(may_run and can_run_graph(forward_batch))

        runner.can_run_graph = can_go_on_in_a_graph

    def replay(self, graph: BreakableCUDAGraph) -> None:
        """Replay a graph, or the rest of it if the batch is resumed.

        Raises:
            ForwardPreempted: the replay was stopped at a safepoint.
        """
        if self._resumption.first == 0:
            if self._gate.attention[0]:
                self._gate.reached(0)
            graph.replay()
            return
        place = self._places[graph][self._resumption.first]
        graph._break_fns[place]()
        rest = BreakableCUDAGraph()
        rest._segments = graph._segments[place + 1 :]
        rest._break_fns = graph._break_fns[place + 1 :]
        rest.replay()

    def forget(self) -> None:
        """Discard the data on all graphs, which are about to be released."""
        self._places.clear()

    def _cut_before(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        reach = eager_on_graph(enable=True)(self._reach)

        def cut_and_forward(*args: Any, **kwargs: Any) -> Any:
            arguments = compat.complete_arguments((*args, *kwargs.values()))
            reach(number, *_tensors((*arguments, *compat.tensors_beside(arguments))))
            capture = breakable._current_capture_var.get()
            if capture is not None:
                graph = capture.cuda_graph
                self._places.setdefault(graph, {})[number] = len(graph._break_fns) - 1
            positional, named = arguments[: len(args)], arguments[len(args) :]
            return forward(*positional, **dict(zip(kwargs, named, strict=True)))

        return cut_and_forward

    def _reach(self, number: int, *tensors: torch.Tensor) -> None:
        """Stop or go on at a cut; ``tensors`` are the memory that the next piece reads."""
        resumes_here = number == self._resumption.first
        if self._gate.attention[0]:
            try:
                self._gate.reached(number)
            except ForwardPreempted:
                if not resumes_here:  # Otherwise the tensors kept before are still valid.
                    self._resumption.outputs = _Inputs(tuple(each.clone() for each in tensors))
                raise
        if resumes_here:
            kept = self._resumption.resumed
            assert isinstance(kept, _Inputs), "the batch did not stop in a graph"
            for each, value in zip(tensors, kept.tensors, strict=True):
                each.copy_(value)


def why_graphs_cannot_be_cut() -> str | None:
    """Return why no graph of this process can be cut; None if they can."""
    if compat.lends_graph_memory():
        return "SGLANG_ENABLE_GRAPH_POOL_BORROW lends the memory of graphs to other work: unset it"
    return None


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors among the arguments, including those in nested lists and tuples."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += _tensors(value)
    return found


def _restore(layer: nn.Module, own_forward: Callable[..., Any] | None) -> None:
    """Undo the replacement of ``layer.forward``, which may have been an instance attribute."""
    del layer.forward
    if own_forward is not None:
        layer.forward = own_forward
