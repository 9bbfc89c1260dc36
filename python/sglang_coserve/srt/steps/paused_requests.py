"""The paused and parked offline requests, which keep their KV outside of SGLang's batches.

They are split off a batch and join it again, with their KV and their penalties kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)
from sglang.srt.sampling.penaltylib.orchestrator import BatchedPenalizerOrchestrator


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


def has_plain_state(req: Req) -> bool:
    """Return whether a request's state is only its tokens and its KV, so that it can skip steps.

    Penalties count tokens in tensors that a split would shift under overlap
    scheduling; log-probabilities, grammars and custom processors keep state of
    their own. Such requests are never paused, but retracted. A LoRA adapter is no such state:
    SGLang loads the adapters of a batch's requests, as long as it has slots for all.
    """
    params = req.sampling_params
    return not (
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens
        or params.logit_bias
        or req.return_logprob
        or req.grammar is not None
        or req.custom_logit_processor
        or req.input_embeds is not None
        or req.multimodal_inputs is not None
        or req.session is not None
    )


def empty_batch() -> ScheduleBatch:
    """Return a batch without requests."""
    return ScheduleBatch(reqs=[], batch_is_full=False)


def split(batch: ScheduleBatch, rids: Collection[str]) -> ScheduleBatch:
    """Remove the requests in ``rids`` from ``batch``; return them as a separate batch.

    The requests must have plain state (``has_plain_state``).
    """
    chosen = [i for i, req in enumerate(batch.reqs) if req.rid in rids]
    if not chosen:
        return empty_batch()
    taken = copy.copy(batch)
    info = copy.copy(batch.sampling_info)
    if info.custom_params is not None:
        info.custom_params = list(info.custom_params)
    # The requests have no penalties, so a new orchestrator without state is right.
    info.penalizer_orchestrator = new_penalties(batch, [batch.reqs[i] for i in chosen])
    taken.sampling_info = info
    taken.filter_batch(keep_indices=chosen)
    info.penalizer_orchestrator.batch = taken
    out = set(chosen)
    batch.filter_batch(keep_indices=[i for i in range(len(batch.reqs)) if i not in out])
    return taken


def join(batch: ScheduleBatch, other: ScheduleBatch) -> ScheduleBatch:
    """Return one batch with the requests of both."""
    if not other.reqs:
        return batch
    if not batch.reqs:
        return other
    batch.merge_batch(other)
    return batch


Req = Any


class PausedRequests:
    """Parked requests (unfinished prefills) and paused requests (decodes).

    Paused requests stay in a batch of their own, because their sampling state is
    in the batch's tensors. This class never releases KV: that is up to the caller that
    removes requests for good.
    """

    def __init__(self) -> None:
        self._parked: dict[str, Req] = {}
        self.batch = empty_batch()
        """The paused requests; to be changed by whoever takes some out for good."""

    def __len__(self) -> int:
        return len(self._parked) + len(self.batch.reqs)

    @property
    def parked(self) -> list[Req]:
        """The parked requests, in the order in which they were parked."""
        return list(self._parked.values())

    @property
    def paused(self) -> list[Req]:
        """The paused requests, in the order in which they joined."""
        return list(self.batch.reqs)

    @property
    def reqs(self) -> list[Req]:
        """All paused and parked requests."""
        return [*self.paused, *self.parked]

    # --- Parked --------------------------------------------------------------------------

    def park(self, req: Req) -> None:
        """Add a request whose prefill is unfinished."""
        self._parked[req.rid] = req

    def unpark(self, rid: str) -> Req | None:
        """Remove and return the parked request named ``rid``; None if there is none."""
        return self._parked.pop(rid, None)

    def unpark_all(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Remove and return the parked requests that match. O(parked)."""
        return [self._parked.pop(req.rid) for req in self.parked if matches(req)]

    # --- Paused --------------------------------------------------------------------------

    def pause(self, running: ScheduleBatch, rids: Collection[str]) -> None:
        """Move the requests in ``rids``, which must have plain state, out of the running batch."""
        self.hold(split(running, rids))

    def hold(self, decodes: ScheduleBatch) -> None:
        """Add a batch of decodes to the paused requests."""
        self.batch = join(self.batch, decodes)

    def take_batch(self) -> ScheduleBatch:
        """Remove and return the batch of paused requests."""
        batch, self.batch = self.batch, empty_batch()
        return batch

    def resume(self, running: ScheduleBatch, rids: Collection[str]) -> ScheduleBatch:
        """Move the paused requests in ``rids`` to the running batch, and return it."""
        return join(running, split(self.batch, rids)) if rids else running

    def take_all(self) -> list[Req]:
        """Remove and return all requests, and discard their batch."""
        reqs = [*self.parked, *self.paused]
        self._parked, self.batch = {}, empty_batch()
        return reqs
