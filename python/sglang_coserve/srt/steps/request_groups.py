"""Splits requests off a batch and joins them again, with their KV kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

from sglang_coserve.srt.steps.penalties import new_penalties

__all__ = ["has_plain_state", "join", "split"]

Req = Any
ScheduleBatch = Any


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


def _filter(batch: ScheduleBatch, places: list[int]) -> None:
    batch.filter_batch(keep_indices=places)


def split(
    batch: ScheduleBatch,
    rids: Collection[str],
    keep: Callable[[ScheduleBatch, list[int]], None] = _filter,
) -> ScheduleBatch | None:
    """Remove the requests in ``rids`` from ``batch``; return them as a separate batch.

    The requests must have plain state (``has_plain_state``). Returns None if no request is named.
    ``keep`` reduces a batch to the given requests; by default SGLang's method.
    """
    chosen = [i for i, req in enumerate(batch.reqs) if req.rid in rids]
    if not chosen:
        return None
    taken = copy.copy(batch)
    info = copy.copy(batch.sampling_info)
    if info.custom_params is not None:
        info.custom_params = list(info.custom_params)
    # The requests have no penalties, so a new orchestrator without state is right.
    info.penalizer_orchestrator = new_penalties(batch, [batch.reqs[i] for i in chosen])
    taken.sampling_info = info
    keep(taken, chosen)
    info.penalizer_orchestrator.batch = taken
    out = set(chosen)
    keep(batch, [i for i in range(len(batch.reqs)) if i not in out])
    return taken


def join(batch: ScheduleBatch | None, other: ScheduleBatch | None) -> ScheduleBatch | None:
    """Return one batch with the requests of both."""
    if other is None or not other.reqs:
        return batch
    if batch is None or not batch.reqs:
        return other
    batch.merge_batch(other)
    return batch
