"""Lets a request's seed choose its tokens, on any engine.

SGLang samples by the seeds of requests only with ``--enable-deterministic-inference``, and ignores
them otherwise. Here a batch in which a request has a seed is sampled by SGLang's function for that:
each token by the request's seed and the token's position, so that neither the other requests nor a
suspension, retraction or continuation changes it. Requests of the batch without a seed get one at
random. A batch without any is sampled as ever.

Seeds choose among the probabilities that the model computes. Those depend on the batch, by rounding
alone, unless the engine's kernels do not (``--enable-deterministic-inference``).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

_NUM_SEEDS: Final = 2**63
"""SGLang's seeds are signed and of 64 bits."""


def install_seeds() -> None:
    """Make SGLang in this process take the seeds of requests."""
    build, merge = SamplingBatchInfo.from_schedule_batch, SamplingBatchInfo.merge_batch

    def from_schedule_batch(_cls: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        info = build(batch, *args, **kwargs)
        given = [req.sampling_params.sampling_seed for req in batch.reqs]
        if info.sampling_seed is None and any(seed is not None for seed in given):
            info.sampling_seed = _seeds(given, info.device)
        return info

    def merge_batch(self: Any, other: Any) -> None:
        if (self.sampling_seed is None) != (other.sampling_seed is None):
            for one in (self, other):
                if one.sampling_seed is None:
                    one.sampling_seed = _seeds([None] * len(one), one.device)
        merge(self, other)

    SamplingBatchInfo.from_schedule_batch = classmethod(from_schedule_batch)
    SamplingBatchInfo.merge_batch = merge_batch


def _seeds(given: Sequence[int | None], device: Any) -> torch.Tensor:
    """Return a seed for each row: the one given, or one at random."""
    # From the generator that SGLang seeds alike on all ranks: they must choose the same tokens.
    drawn = torch.randint(_NUM_SEEDS - 1, (len(given),)).tolist()
    chosen = [other if one is None else one for one, other in zip(given, drawn, strict=True)]
    return torch.tensor(chosen, dtype=torch.int64).to(device, non_blocking=True)


def give_each_choice_its_seed(tokenized: Any) -> None:
    """Let each of ``n`` choices, which SGLang sends in turn, be sampled by the next seed.

    All are sent with the same sampling parameters, and would be equal.
    """
    shared = tokenized.sampling_params
    if shared.n > 1 and shared.sampling_seed is not None:
        tokenized.sampling_params = copy.copy(shared)
        shared.sampling_seed = (shared.sampling_seed + 1) % _NUM_SEEDS
