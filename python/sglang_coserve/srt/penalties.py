"""The penalties of rows that SGLang takes for new: split off a batch, or back after an eviction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.sampling.penaltylib.orchestrator import BatchedPenalizerOrchestrator

__all__ = ["new_penalties", "restore_penalties"]

Req = Any
ScheduleBatch = Any


@dataclass(eq=False)
class _Rows:
    """What an orchestrator of penalties looks at of a batch."""

    reqs: Sequence[Req]
    device: Any


def new_penalties(batch: ScheduleBatch, reqs: Sequence[Req]) -> Any:
    """Return the orchestrator that SGLang would make for a batch of ``reqs``, some of ``batch``'s.

    It knows of no output tokens, and keeps no reference to ``reqs``: before it is
    filtered, its ``batch`` is to be set.
    """
    penalties = batch.sampling_info.penalizer_orchestrator
    rows = _Rows(reqs, batch.device)
    return BatchedPenalizerOrchestrator(penalties.vocab_size, rows, set(penalties.penalizers))


def restore_penalties(batch: ScheduleBatch) -> None:
    """Count, in a new prefill or mixed batch, the output tokens that its prefill rows came with.

    SGLang starts every prefill without, also that of a request which was evicted.
    O(output tokens) for rows with penalties that came with some; else O(rows) at most.
    """
    penalties = batch.sampling_info.penalizer_orchestrator
    if not penalties.is_required:
        return
    num_prefills = len(batch.reqs) - len(batch.decoding_reqs or ())
    for row, req in enumerate(batch.reqs[:num_prefills]):
        if not req.output_ids or req is batch.chunked_req:
            continue
        tokens = req.output_ids
        if batch.enable_overlap:
            # SGLang then counts a token one step late, and the last of the prompt first.
            tokens = [req.origin_input_ids[-1], *tokens[:-1]]
        counted = new_penalties(batch, [req])
        for token in tokens:
            counted.cumulate_output_tokens(torch.tensor([token], device=batch.device))
        for kind, penalizer in counted.penalizers.items():
            # Each penalizer keeps tensors with a row per request, as its filter shows.
            for name, value in vars(penalizer).items():
                if isinstance(value, torch.Tensor):
                    getattr(penalties.penalizers[kind], name)[row] = value[0]
