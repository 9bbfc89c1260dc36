"""The penalties of rows that SGLang takes for new: split off a batch, or back after an eviction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)
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
        tokens = list(req.output_ids)
        if batch.enable_overlap:
            # SGLang then counts a token one step late, and the last of the prompt first.
            tokens = [req.origin_input_ids[-1], *tokens[:-1]]
        counted = new_penalties(batch, [req])
        _count(counted, torch.tensor(tokens, device=batch.device))
        for kind, penalizer in counted.penalizers.items():
            # Each penalizer keeps tensors with a row per request, as its filter shows.
            for name, value in vars(penalizer).items():
                if isinstance(value, torch.Tensor):
                    getattr(penalties.penalizers[kind], name)[row] = value[0]


def _count(penalties: Any, tokens: torch.Tensor) -> None:
    """Count the output tokens of the one row of ``penalties``, all at once.

    SGLang counts one of each row at a time. Of the same token the same amount is added
    or set each time, so that neither their order nor how they are added up matters.
    """
    for kind, penalizer in penalties.penalizers.items():
        if not penalizer.is_prepared():
            continue
        if kind is BatchedFrequencyPenalizer:
            amounts = penalizer.frequency_penalties[0].expand(len(tokens))
            penalizer.cumulated_frequency_penalties[0].scatter_add_(0, tokens, amounts)
        elif kind is BatchedPresencePenalizer:
            amounts = penalizer.presence_penalties[0].expand(len(tokens))
            penalizer.cumulated_presence_penalties[0].scatter_(0, tokens, amounts)
        elif kind is BatchedRepetitionPenalizer:
            amounts = penalizer.repetition_penalties[0].expand(len(tokens))
            penalizer.cumulated_repetition_penalties[0].scatter_(0, tokens, amounts)
        elif kind is BatchedMinNewTokensPenalizer:
            penalizer.len_output_tokens += len(tokens)
        else:
            for token in tokens.split(1):
                penalizer.cumulate_output_tokens(token)
