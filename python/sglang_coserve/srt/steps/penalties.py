"""Keeps the penalties of requests that SGLang treats as new: split off a batch, or retracted."""

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
class _Batch:
    """The fields of a batch that a penalty orchestrator reads."""

    reqs: Sequence[Req]
    device: Any


def new_penalties(batch: ScheduleBatch, reqs: Sequence[Req]) -> Any:
    """Return a new penalty orchestrator for a batch of ``reqs``, which are some of ``batch``'s.

    It has counted no output tokens, and keeps no reference to ``reqs``: its ``batch`` must be
    set before it is filtered.
    """
    penalties = batch.sampling_info.penalizer_orchestrator
    members = _Batch(reqs, batch.device)
    return BatchedPenalizerOrchestrator(penalties.vocab_size, members, set(penalties.penalizers))


def restore_penalties(batch: ScheduleBatch) -> None:
    """Count the output tokens that the prefills of a new prefill or mixed batch already have.

    SGLang starts every prefill without counts, also that of a retracted request.
    O(output tokens) of such requests if they have penalties; otherwise at most O(requests).
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
    """Count all output tokens of the only request of ``penalties`` at once.

    SGLang counts one token of each request at a time. The amount for a token is always the same,
    so neither the order nor the way of summation matters.
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
