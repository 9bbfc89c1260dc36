"""Places the safepoints of a forward pass: between layers, and in CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn

from sglang_coserve.srt.forward_kind import ForwardKind
from sglang_coserve.srt.safepoint.graph_cuts import GraphCuts
from sglang_coserve.srt.safepoint.grouped_decode_graph import (
    add_grouped_decode_graphs,
    why_no_grouped_decode_graphs,
)
from sglang_coserve.srt.safepoint.instrument import Gate, add_safepoints
from sglang_coserve.srt.safepoint.prefill_graphs import cut_prefill_graphs
from sglang_coserve.srt.safepoint.resumption import Resumption

__all__ = ["RUN_AHEAD", "SafepointPlacement", "place_between_layers", "place_on_cuda"]

RUN_AHEAD: Final = 1
"""Groups of layers that the host may launch ahead of the one that the GPU computes."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SafepointPlacement:
    """The safepoints installed in a model."""

    gate: Gate
    """The gate that they ask."""

    resumption: Resumption
    outstanding_groups: int = 1
    """Most groups of layers that still run after a stop was requested."""

    no_safepoints: Mapping[ForwardKind, str] = field(default_factory=dict)
    """The kinds of batches without safepoints, each with the reason."""


def place_between_layers(
    layers: Sequence[nn.Module], interval: int, gate: Gate, outstanding_groups: int
) -> SafepointPlacement:
    """Place safepoints between the layers of a model that runs without graphs.

    ``outstanding_groups`` still run after a stop was requested.
    """
    add_safepoints(layers, interval, gate)
    return SafepointPlacement(gate, Resumption(layers), outstanding_groups)


def place_on_cuda(
    scheduler: Any, layers: Sequence[nn.Module], interval: int, gate: Gate, *, groups_decodes: bool
) -> SafepointPlacement:
    """Place safepoints between layers, and in prefill graphs.

    With ``groups_decodes`` also in decode graphs. Must be called by all ranks, after SGLang has
    captured its graphs, and only if ``why_prefills_cannot_stop`` returns None.

    Raises:
        RuntimeError: graphs could not be captured again.
    """
    runner = scheduler.tp_worker.model_runner
    # For passes without graphs: a prefill may be longer than the captured ones.
    add_safepoints(layers, interval, gate)
    resumption = Resumption(layers)
    cut_prefill_graphs(runner, GraphCuts(layers, interval, gate, resumption))
    no_safepoints: dict[ForwardKind, str] = {}
    if getattr(runner.decode_cuda_graph_runner, "backend", None) is not None:
        no_safepoints[ForwardKind.DECODE] = "a decode step is a single CUDA graph, and short"
    if groups_decodes:
        why_not = why_no_grouped_decode_graphs(runner)
        if why_not is None:
            add_grouped_decode_graphs(runner, GraphCuts(layers, interval, gate, resumption), gate)
            no_safepoints.clear()
        else:
            logger.warning("--safepoint-decode-graphs changes nothing: %s", why_not)
    return SafepointPlacement(gate, resumption, 1 + RUN_AHEAD, no_safepoints)
