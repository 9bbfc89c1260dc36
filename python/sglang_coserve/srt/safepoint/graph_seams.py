"""Safepoints between the pieces of a CUDA graph.

On a GPU SGLang replays a prefill as pieces of a CUDA graph, and no code of a layer runs.
But attention is called between the pieces: breakable graphs break there
(``eager_on_graph``), and piecewise compilation splits there (``register_split_op``). Both
end in the attention backend's ``forward``, and so does a pass without graphs. There the
safepoints are put: the graphs stay SGLang's, nothing is captured anew, and passes that are
not armed run them as they are.

Layers themselves must not be replaced on a GPU: the compiled passes are guarded by their
``forward``, and would be compiled again in the middle of serving, which fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.runner_backend import FullCudaGraphBackend
from torch import nn

from sglang_coserve.srt.safepoint.grouped_decode_graph import GroupedDecodeBackend
from sglang_coserve.srt.safepoint.in_flight import BatchKind
from sglang_coserve.srt.safepoint.instrument import Gate

__all__ = ["add_attention_safepoints", "has_prefill_graphs", "kinds_without_safepoints"]

AttentionBackend = Any
ModelRunner = Any


def add_attention_safepoints(
    attention_backend: AttentionBackend, layers: Sequence[nn.Module], interval: int, gate: Gate
) -> int:
    """Put a safepoint before the attention of every ``interval``-th layer; return how many.

    A pass that ends there has run the layer's projections, but has not written its KV.
    While a batch is armed the first word of ``gate.attention`` must be its name.
    """
    numbers = {
        module.layer_id: number
        for number in range(0, len(layers), interval)
        for module in layers[number].modules()
        if isinstance(module, RadixAttention)
    }
    forward, attention, reached = attention_backend.forward, gate.attention, gate.reached
    passed = (0, -1)

    def forward_from_safepoint(
        q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        nonlocal passed
        if attention[0] and layer.layer_id in numbers:
            # Some layers attend to a long prefix in several calls; the first is the safepoint.
            here = (attention[0], numbers[layer.layer_id])
            if here != passed:
                passed = here
                reached(here[1])
        return forward(q, k, v, layer, *args, **kwargs)

    attention_backend.forward = forward_from_safepoint
    return len(set(numbers.values()))


def has_prefill_graphs(model_runner: ModelRunner) -> bool:
    """Return whether prefills run on CUDA graphs, of any kind."""
    return _backend_of(model_runner.prefill_cuda_graph_runner) is not None


def kinds_without_safepoints(model_runner: ModelRunner) -> dict[BatchKind, str]:
    """Return the kinds of batches that never meet a safepoint on a GPU, and why."""
    kinds: dict[BatchKind, str] = {}
    # Without graphs there is no runner, or one without a backend.
    if isinstance(_backend_of(model_runner.prefill_cuda_graph_runner), FullCudaGraphBackend):
        reason = "a prefill is a single CUDA graph (--cuda-graph-backend-prefill full)"
        kinds = {BatchKind.EXTEND: reason, BatchKind.MIXED: reason}
    decode_backend = _backend_of(model_runner.decode_cuda_graph_runner)
    if decode_backend is not None and not isinstance(decode_backend, GroupedDecodeBackend):
        kinds[BatchKind.DECODE] = "a decode step is a single CUDA graph, and short"
    return kinds


def _backend_of(runner: Any) -> Any:
    return getattr(runner, "backend", None)
