"""Decode graphs that can be suspended: cut into groups of layers, in addition to SGLang's own.

SGLang runs a decode step as one CUDA graph, which cannot be stopped once launched. Here every
shape is captured twice: as in SGLang, for batches that are not armed, and as one graph
per group of layers, with a safepoint on the host before each. Attention stays inside the
graphs.

Both are captured after one preparation of the attention backend: some backends keep
buffers per shape, and a second preparation would replace those of the first graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.model_executor.runner_backend import FullCudaGraphBackend
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
)
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

from sglang_coserve.srt.safepoint.graph_cuts import GraphCuts, why_graphs_cannot_be_cut
from sglang_coserve.srt.safepoint.instrument import Gate

__all__ = ["GroupedDecodeBackend", "add_grouped_decode_graphs", "why_no_grouped_decode_graphs"]

DecodeCudaGraphRunner = Any
ModelRunner = Any


def why_no_grouped_decode_graphs(model_runner: ModelRunner) -> str | None:
    """Return why decode steps cannot be captured as groups of layers; None if they can."""
    runner = model_runner.decode_cuda_graph_runner
    if runner is None:
        return "decode steps run without CUDA graphs"
    if type(runner.backend) is not FullCudaGraphBackend:
        return f"decode steps are captured by {type(runner.backend).__name__}"
    if runner.enable_torch_compile:
        return "decode steps are compiled as a whole"
    if model_runner.server_args.enable_memory_saver:
        return "the memory saver releases decode graphs by itself"
    return why_graphs_cannot_be_cut()


def add_grouped_decode_graphs(model_runner: ModelRunner, cuts: GraphCuts, gate: Gate) -> None:
    """Capture all decode graphs again, each also with cuts.

    Takes about twice as long as SGLang's own capture; every rank must call it before the
    first batch.

    Raises:
        RuntimeError: a capture failed, as it would in SGLang's; the engine cannot go on.
    """
    runner = model_runner.decode_cuda_graph_runner
    runner.backend.cleanup()
    runner.backend = GroupedDecodeBackend(runner, cuts, gate)
    with model_capture_mode():
        runner.capture()
    cuts.guard(runner)


class GroupedDecodeBackend(FullCudaGraphBackend):
    """SGLang's backend of decode graphs; in an armed batch it replays the grouped ones."""

    def __init__(self, runner: DecodeCudaGraphRunner, cuts: GraphCuts, gate: Gate) -> None:
        super().__init__(runner)
        self._cuts = cuts
        self._gate = gate
        self._grouped: dict[Any, tuple[BreakableCUDAGraph, Any]] = {}

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        """Capture a shape as one graph and as groups of layers."""
        super().capture_one(shape_key, forward_fn, capture_inputs, post_warmup_hook)
        if post_warmup_hook is not None:
            # Capturing ran the host code of the forward pass, like a warm-up.
            post_warmup_hook()
        graph = BreakableCUDAGraph()
        capture = BreakableCUDAGraphCapture(
            graph,
            pool=self._pool,
            stream=self._capture_stream,
            barrier_fn=self._tp_group.barrier,
        )
        with self._cuts.placed(), capture:
            output = forward_fn()
        self._grouped[shape_key] = graph, output

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        """Replay a step; by groups of layers if it may be suspended or is resumed."""
        if not (self._gate.attention[0] or self._cuts.is_resumed):
            return super().replay(shape_key, static_forward_batch, **kwargs)
        graph, output = self._grouped[shape_key]
        self._cuts.replay(graph)
        return output

    def cleanup(self) -> None:
        """Release all graphs."""
        super().cleanup()
        self._grouped.clear()
        self._cuts.forget()
