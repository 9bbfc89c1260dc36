"""Puts safepoints into CUDA graphs.

SGLang runs a decode step as one CUDA graph, which cannot be stopped once launched. Here every shape
is captured twice: as in SGLang, for batches that are not armed, and as one graph per group of
layers, with a safepoint on the host before each. Attention stays inside the graphs. Both are
captured after one preparation of the attention backend: some backends keep buffers per shape, and
a second preparation would replace those of the first graph.

SGLang's breakable graphs of prefills break only at attention, where intermediate results of a layer
are in memory shared by all graphs. So they are captured again, with cuts between groups of layers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.runner_backend import BreakableCudaGraphBackend, FullCudaGraphBackend
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
)
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

from sglang_coserve.srt.forward_kind import ForwardKind
from sglang_coserve.srt.safepoint.graph_cuts import GraphCuts, why_graphs_cannot_be_cut

logger = logging.getLogger(__name__)

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
    if _prepares_in_graph(runner.attn_backend):
        return (
            "the attention backend prepares each step within its graph, which the rest of it lacks"
        )
    return why_graphs_cannot_be_cut()


def _prepares_in_graph(backend: Any) -> bool:
    """Return whether decode graphs begin with what an attention backend prepares for a batch.

    Other batches prepare theirs in the same buffers while a step is suspended.
    """
    parts = getattr(backend, "attn_backend_list", None)
    if parts is None and hasattr(backend, "decode_backend"):
        parts = [backend.decode_backend]
    if parts:
        return any(map(_prepares_in_graph, parts))
    own = type(backend).init_forward_metadata_in_graph
    return own is not AttentionBackend.init_forward_metadata_in_graph


def add_grouped_decode_graphs(model_runner: ModelRunner, cuts: GraphCuts) -> None:
    """Capture all decode graphs again, each also with cuts.

    Takes about twice as long as SGLang's own capture; every rank must call it before the
    first batch.

    Raises:
        RuntimeError: a capture failed, as it would in SGLang's; the engine cannot go on.
    """
    runner = model_runner.decode_cuda_graph_runner
    runner.backend.cleanup()
    runner.backend = GroupedDecodeBackend(runner, cuts)
    with model_capture_mode():
        runner.capture()
    cuts.guard(runner)


class GroupedDecodeBackend(FullCudaGraphBackend):
    """SGLang's backend of decode graphs; in an armed batch it replays the grouped ones."""

    def __init__(self, runner: DecodeCudaGraphRunner, cuts: GraphCuts) -> None:
        super().__init__(runner)
        self._cuts = cuts
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
        if not self._cuts.are_in_use:
            return super().replay(shape_key, static_forward_batch, **kwargs)
        graph, output = self._grouped[shape_key]
        self._cuts.replay(graph)
        return output

    def cleanup(self) -> None:
        """Release all graphs."""
        super().cleanup()
        self._grouped.clear()
        self._cuts.forget()


PrefillCudaGraphRunner = Any


def why_prefills_cannot_stop(model_runner: ModelRunner) -> str | None:
    """Return why the prefills of an engine on a GPU cannot be stopped; None if they can."""
    # Without graphs there is no runner, or one without a backend.
    backend = getattr(model_runner.prefill_cuda_graph_runner, "backend", None)
    if backend is None:
        return None
    if type(backend) is not BreakableCudaGraphBackend:
        return (
            f"prefills run as one piece ({type(backend).__name__}): use "
            "--cuda-graph-backend-prefill breakable or disabled"
        )
    if model_runner.server_args.debug_cuda_graph:
        return "--debug-cuda-graph runs the whole of a prefill graph as one call"
    return why_graphs_cannot_be_cut()


def cut_prefill_graphs(model_runner: ModelRunner, cuts: GraphCuts) -> None:
    """Capture the prefill graphs, if any, again with cuts.

    Takes as long as SGLang's own capture; every rank must call it before the first batch.

    Raises:
        RuntimeError: a capture failed, as it would in SGLang's; the engine cannot go on.
    """
    runner = model_runner.prefill_cuda_graph_runner
    if getattr(runner, "backend", None) is None:
        return
    runner.backend.cleanup()
    runner.backend = CutPrefillBackend(runner, cuts)
    runner.capture()
    cuts.guard(runner)


class CutPrefillBackend(BreakableCudaGraphBackend):
    """SGLang's backend of breakable graphs; in an armed batch a replay may stop at a cut."""

    def __init__(self, runner: PrefillCudaGraphRunner, cuts: GraphCuts) -> None:
        saves_memory = runner.model_runner.server_args.enable_memory_saver
        super().__init__(runner, enable_memory_saver=saves_memory)
        self._cuts = cuts

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        """Capture a shape with cuts."""
        with self._cuts.placed():
            super().capture_one(shape_key, forward_fn, capture_inputs, post_warmup_hook)

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        """Replay a prefill, or the rest of a resumed one."""
        del static_forward_batch, kwargs  # The graph reads the runner's static buffers.
        self._cuts.replay(self._graphs[shape_key])
        return self._outputs[shape_key]

    def cleanup(self) -> None:
        """Release all graphs."""
        super().cleanup()
        self._cuts.forget()


def cut_graphs(
    model_runner: ModelRunner, cuts: Callable[[], GraphCuts], *, groups_decodes: bool
) -> dict[ForwardKind, str]:
    """Cut prefill graphs and, with ``groups_decodes``, those of decodes; ``cuts`` makes cuts.

    Returns the kinds of batches that meet no safepoint, each with the reason. Must be called by all
    ranks, after SGLang has captured its graphs, and only if ``why_prefills_cannot_stop`` returns
    None.

    Raises:
        RuntimeError: graphs could not be captured again.
    """
    cut_prefill_graphs(model_runner, cuts())
    if groups_decodes:
        why_not = why_no_grouped_decode_graphs(model_runner)
        if why_not is None:
            add_grouped_decode_graphs(model_runner, cuts())
            return {}
        logger.warning("--safepoint-decode-graphs changes nothing: %s", why_not)
    if getattr(model_runner.decode_cuda_graph_runner, "backend", None) is None:
        return {}
    return {ForwardKind.DECODE: "a decode step is a single CUDA graph, and short"}
