"""Decode graphs that can be aborted: cut into groups of layers, beside SGLang's own.

A decode step is one CUDA graph, and a graph that was launched runs to its end. Here every
shape is captured twice: as SGLang does, for batches that are not armed, and as one graph
per group of layers, with a safepoint on the host before each. Attention stays inside the
graphs.

Both are captured from one preparation of the attention backend: some backends keep
buffers per shape that a second preparation would replace under the first graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from sglang.srt.model_executor.runner_backend import FullCudaGraphBackend
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    eager_on_graph,
)
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
from torch import nn

from sglang_coserve.srt.safepoint.instrument import Gate

__all__ = ["GroupedDecodeBackend", "add_grouped_decode_graphs", "why_no_grouped_decode_graphs"]

DecodeCudaGraphRunner = Any
ModelRunner = Any


def why_no_grouped_decode_graphs(model_runner: ModelRunner) -> str | None:
    """Return why decode steps cannot be captured in groups of layers; None if they can."""
    runner = model_runner.decode_cuda_graph_runner
    if runner is None:
        return "decode steps run without CUDA graphs"
    if type(runner.backend) is not FullCudaGraphBackend:
        return f"decode steps are captured by {type(runner.backend).__name__}"
    if runner.enable_torch_compile:
        return "decode steps are compiled as a whole"
    if model_runner.server_args.enable_memory_saver:
        return "the memory saver releases decode graphs by itself"
    return None


def add_grouped_decode_graphs(
    model_runner: ModelRunner, layers: Sequence[nn.Module], interval: int, gate: Gate
) -> None:
    """Capture all decode graphs again, each also in groups of ``interval`` layers.

    Takes about twice as long as SGLang's own capture; every rank must call it, before the
    first batch.

    Raises:
        RuntimeError: a capture failed, as it would in SGLang's; the engine cannot go on.
    """
    runner = model_runner.decode_cuda_graph_runner
    runner.backend.cleanup()
    runner.backend = GroupedDecodeBackend(runner, layers, interval, gate)
    with model_capture_mode():
        runner.capture()


class GroupedDecodeBackend(FullCudaGraphBackend):
    """SGLang's backend of decode graphs; in an armed batch it replays the grouped ones."""

    def __init__(
        self,
        runner: DecodeCudaGraphRunner,
        layers: Sequence[nn.Module],
        interval: int,
        gate: Gate,
    ) -> None:
        super().__init__(runner)
        self._cut_layers = {
            number: layers[number] for number in range(interval, len(layers), interval)
        }
        self._gate = gate
        self._grouped: dict[Any, tuple[BreakableCUDAGraph, Any]] = {}

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        """Capture a shape both ways."""
        super().capture_one(shape_key, forward_fn, capture_inputs, post_warmup_hook)
        if post_warmup_hook is not None:
            # Capturing ran the pass's host code, as a warm-up does.
            post_warmup_hook()
        graph = BreakableCUDAGraph()
        capture = BreakableCUDAGraphCapture(
            graph,
            pool=self._pool,
            stream=self._capture_stream,
            barrier_fn=self._tp_group.barrier,
        )
        with self._cut(), capture:
            output = forward_fn()
        self._grouped[shape_key] = graph, output

    @contextmanager
    def _cut(self) -> Iterator[None]:
        """Within it, a graph that is captured is cut before each group of layers but the first."""
        with ExitStack() as restored:
            for number, layer in self._cut_layers.items():
                own = vars(layer).get("forward")
                layer.forward = self._cut_before(number, layer.forward)
                restored.callback(_restore, layer, own)
            yield

    def _cut_before(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        safepoint = eager_on_graph(True)(self._safepoint)

        def cut_and_forward(*args: Any, **kwargs: Any) -> Any:
            safepoint(number)
            return forward(*args, **kwargs)

        return cut_and_forward

    def _safepoint(self, number: int) -> None:
        if self._gate.attention[0]:
            self._gate.reached(number)

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        """Replay a step, in groups if it may be aborted."""
        if not self._gate.attention[0]:
            return super().replay(shape_key, static_forward_batch, **kwargs)
        graph, output = self._grouped[shape_key]
        self._safepoint(0)
        graph.replay()
        return output

    def cleanup(self) -> None:
        """Release all graphs."""
        super().cleanup()
        self._grouped.clear()


def _restore(layer: nn.Module, own_forward: Callable[..., Any] | None) -> None:
    """Undo the replacement of ``layer.forward``, which may have been the instance's own before."""
    del layer.forward
    if own_forward is not None:
        layer.forward = own_forward
