"""Where in a pass the safepoints are: between layers on a CPU, before attention on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn

from sglang_coserve.config import CoserveConfig
from sglang_coserve.errors import UnsupportedError
from sglang_coserve.srt.safepoint.flag import PreemptionFlag
from sglang_coserve.srt.safepoint.graph_seams import (
    add_attention_safepoints,
    has_prefill_graphs,
    kinds_without_safepoints,
)
from sglang_coserve.srt.safepoint.grouped_decode_graph import (
    add_grouped_decode_graphs,
    why_no_grouped_decode_graphs,
)
from sglang_coserve.srt.safepoint.in_flight import BatchKind
from sglang_coserve.srt.safepoint.instrument import Gate, add_safepoints
from sglang_coserve.srt.safepoint.resumption import Resumption
from sglang_coserve.srt.safepoint.run_ahead import RunAheadGate, cuda_events

__all__ = ["Placement", "place_on_cpu", "place_on_cuda"]

_RUN_AHEAD: Final = 1
"""Groups of layers that the host may launch ahead of the one that the GPU computes."""


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placement:
    """The safepoints of a model that are in place."""

    gate: Gate
    """The one that they ask; to be armed."""

    outstanding_groups: int = 1
    """Most groups of layers that still run after an abort was asked for."""

    kept: Mapping[BatchKind, str] = field(default_factory=dict)
    """The kinds of batches that never meet a safepoint, and why."""

    resumption: Resumption | None = None
    """With ``--safepoint-mode shrink``: lets the online rows of an aborted batch go on."""


def place_on_cpu(
    config: CoserveConfig, layers: Sequence[nn.Module], interval: int, gate: Gate
) -> Placement:
    """Put safepoints between the layers of a model that computes while Python waits."""
    add_safepoints(layers, interval, gate)
    shrinks = config.safepoint_mode != "abort"
    return Placement(gate, resumption=Resumption(layers) if shrinks else None)


def place_on_cuda(
    scheduler: Any,
    config: CoserveConfig,
    layers: Sequence[nn.Module],
    interval: int,
    gate: Gate,
    flag: PreemptionFlag,
) -> Placement:
    """Put safepoints before the attention of layers, and between decode graphs if asked for.

    To be called after SGLang has captured its graphs, by all ranks. Rank 0 keeps its host
    close to its GPU; the others, which wait for rank 0, are close by that.

    Raises:
        UnsupportedError: passes run on graphs, so that their online rows cannot go on alone.
        RuntimeError: decode graphs could not be captured in groups.
    """
    runner = scheduler.tp_worker.model_runner
    shrinks = config.safepoint_mode == "shrink"
    if shrinks and has_prefill_graphs(runner):
        raise UnsupportedError(
            "--safepoint-mode shrink takes rows out of a pass between two layers, which a CUDA "
            "graph cannot: add --cuda-graph-backend-prefill disabled, or use --safepoint-mode abort"
        )
    if scheduler.ps.tp_rank == 0:
        gate = RunAheadGate(gate, flag, cuda_events(_RUN_AHEAD))
    if config.safepoint_decode_graphs:
        why_not = why_no_grouped_decode_graphs(runner)
        if why_not is None:
            add_grouped_decode_graphs(runner, layers, interval, gate)
        else:
            logger.warning("--safepoint-decode-graphs changes nothing: %s", why_not)
    if shrinks:
        # Attention is too late: what the layer did before, in place, would be done again.
        add_safepoints(layers, interval, gate)
    else:
        add_attention_safepoints(runner.attn_backend, layers, interval, gate)
    kept = kinds_without_safepoints(runner)
    return Placement(gate, 1 + _RUN_AHEAD, kept, Resumption(layers) if shrinks else None)
