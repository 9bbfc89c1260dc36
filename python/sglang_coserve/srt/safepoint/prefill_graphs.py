"""Prefill graphs that can be suspended: SGLang's breakable graphs with additional breaks.

SGLang breaks them only at attention, where intermediate results of a layer are in memory shared
by all graphs. So they are captured again, with cuts between groups of layers as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.model_executor.runner_backend import BreakableCudaGraphBackend

from sglang_coserve.srt.safepoint.graph_cuts import GraphCuts, why_graphs_cannot_be_cut

__all__ = ["CutPrefillBackend", "cut_prefill_graphs", "why_prefills_cannot_stop"]

ModelRunner = Any
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
