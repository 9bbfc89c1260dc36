"""Keeps sampling from stopping for a compilation, and from ending the scheduler.

SGLang marks two small functions for ``torch.compile``, which compiles them on first use: with the
first request that has a ``repetition_penalty`` (again for the first batch of two requests, and for
other types), or a seed. That took 23 s on four idle cores, during which the scheduler does nothing
else. Without compilation they only read the logits a few more times.

A row of logits with NaN, or without a finite maximum, crashes the scheduler when it is sampled (on
a GPU at some later point, and unrecoverably). Such rows come from a custom logit processor, a
grammar that allows no token, or a model whose values overflow. They are replaced on the device,
without a synchronization, and abort only their own request.

SGLang samples by the seeds of requests only with ``--enable-deterministic-inference``, and ignores
them otherwise. Here a batch in which a request has a seed is sampled by SGLang's function for that:
each token by the request's seed and the token's position, so that neither the other requests nor a
suspension, retraction or continuation changes it. Requests of the batch without a seed get one at
random. Seeds choose among the probabilities that the model computes; those depend on the batch, by
rounding alone, unless the engine's kernels do not.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import torch
from sglang.srt.layers.sampler import Sampler, register_sampler_backend
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.utils.async_probe import sanitize_nan_logits

from sglang_coserve.replacements import replace

logger = logging.getLogger(__name__)


def install_eager_sampling() -> None:
    """Make SGLang in this process call the uncompiled functions."""
    from sglang.srt.layers import sampler
    from sglang.srt.sampling.penaltylib import repetition_penalty

    penalties = _as_written(repetition_penalty.apply_scaling_penalties)
    replace("sglang.srt.sampling.penaltylib.repetition_penalty.apply_scaling_penalties", penalties)
    # Where it is imported to.
    replace("sglang.srt.sampling.sampling_batch_info.apply_scaling_penalties", penalties)
    replace(
        "sglang.srt.layers.sampler.multinomial_with_seed",
        _as_written(sampler.multinomial_with_seed),
    )


def _as_written(function: Any) -> Any:
    """Return the function behind ``torch.compile``; the function itself if there is none."""
    return getattr(function, "_torchdynamo_orig_callable", function)


_BACKENDS: Final = ("flashinfer", "pytorch")
_ATTRIBUTE: Final = "coserve_unusable_rows"

_MESSAGE: Final = (
    "the engine could not choose a token: the logits of this request are not numbers, or "
    "exclude every token; look at its logit processor, grammar, biases and penalties"
)


Processors = Callable[[Any], Iterable[tuple[Any, list[int], Any]]]
"""Returns the custom logit processors of a batch's sampling info, each with its rows of logits: on
the host, and as a tensor on the device."""


def install_guarded_sampler(processors_of: Processors) -> None:
    """Make SGLang in this process sample with ``GuardedSampler``."""
    for backend in _BACKENDS:
        register_sampler_backend(backend, partial(GuardedSampler, processors_of))


class GuardedSampler(Sampler):
    """SGLang's sampler, which attaches a mask of unusable rows to the logits output."""

    def __init__(self, processors_of: Processors) -> None:
        super().__init__()
        self._processors_of = processors_of
        self._unusable: torch.Tensor | None = None
        """Rows of the batch that was preprocessed last."""

    def forward(self, logits_output: Any, sampling_info: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample a token for each row; takes SGLang's arguments."""
        tokens = super().forward(logits_output, sampling_info, *args, **kwargs)
        self._abort_unusable(logits_output)
        return tokens

    def _sample_from_probs(
        self,
        probs: torch.Tensor,
        sampling_info: Any,
        positions: torch.Tensor,
        simple_sampling_case: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if sampling_info.sampling_seed is not None and not simple_sampling_case:
            # FlashInfer's functions take no seeds. Those of SGLang for rows with filters take a
            # seed by the ranks of tokens, so that a row depends on whether another has a filter,
            # and end the scheduler with min_p.
            probs, simple_sampling_case = _filtered(probs, sampling_info), True
        return super()._sample_from_probs(
            probs, sampling_info, positions, simple_sampling_case, *args, **kwargs
        )

    def compute_logprobs_only(self, logits_output: Any, *args: Any, **kwargs: Any) -> None:
        """Compute log-probabilities for requests that want scores and no token."""
        self._unusable = None  # SGLang looks at no logits where nobody wants scores of tokens.
        super().compute_logprobs_only(logits_output, *args, **kwargs)
        self._abort_unusable(logits_output)

    def _abort_unusable(self, logits_output: Any) -> None:
        if self._unusable is not None:
            # This copy ends before that of the tokens, which SGLang waits for.
            setattr(logits_output, _ATTRIBUTE, self._unusable.to("cpu", non_blocking=True))

    def _preprocess_logits(self, logits: torch.Tensor, sampling_info: Any) -> torch.Tensor:
        failed = None
        if sampling_info.has_custom_logit_processor:
            failed = _apply_processors(logits, sampling_info, self._processors_of)
        sanitize_nan_logits(logits, "logits")
        # The maximum is not finite if a logit is NaN or +inf, if all are -inf, or if dividing by
        # the temperature overflows.
        largest = logits.amax(dim=-1)
        if not sampling_info.is_all_greedy:
            largest = largest / sampling_info.temperatures.view(-1)
        unusable = ~torch.isfinite(largest)
        if failed is not None:
            unusable |= failed
        self._unusable = unusable
        return logits.masked_fill_(unusable[:, None], 0.0)


def _filtered(probs: torch.Tensor, sampling_info: Any) -> torch.Tensor:
    """Return ``probs`` with 0 for what top_k, top_p and min_p leave out."""
    ranked, tokens = probs.sort(dim=-1, descending=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    left_out = (
        (ranks >= sampling_info.top_ks.view(-1, 1))
        | (ranked.cumsum(dim=-1) - ranked > sampling_info.top_ps.view(-1, 1))
        | (ranked < ranked[:, :1] * sampling_info.min_ps.view(-1, 1))
    )
    return torch.zeros_like(probs).scatter_(1, tokens, ranked.masked_fill_(left_out, 0.0))


def end_unusable(batch: Any, result: Any) -> None:
    """Abort the requests of ``batch`` whose logits were unusable. O(requests)."""
    rows = getattr(getattr(result, "logits_output", None), _ATTRIBUTE, None)
    if rows is None:
        return
    if result.copy_done is not None:
        result.copy_done.synchronize()
    elif rows.is_pinned():
        torch.cuda.current_stream().synchronize()  # As SGLang does next, to see the tokens.
    if not rows.any():
        return
    for req, is_unusable in zip(batch.reqs, rows.tolist(), strict=True):
        # The logits of a prompt are used only after its last chunk.
        is_used = not (req.finished() or req.is_retracted or req.inflight_middle_chunks > 0)
        if is_unusable and is_used:
            logger.error("request %s: %s", req.rid, _MESSAGE)
            req.to_finish = FINISH_ABORT(_MESSAGE, HTTPStatus.BAD_REQUEST, "BadRequestError")
            # Other requests with the same prefix must not reuse this request's KV.
            req.skip_radix_cache_insert = True


def _apply_processors(
    logits: torch.Tensor, sampling_info: Any, processors_of: Processors
) -> torch.Tensor:
    """Apply custom logit processors; return a mask of the rows on which one failed.

    SGLang applies a processor to all of its rows at once. If that fails, it is applied
    row by row, so that one bad request does not fail the others.
    """
    failed = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    for processor, rows, indices in processors_of(sampling_info):
        params = [sampling_info.custom_params[row] for row in rows]
        try:
            logits[indices] = processor(logits[indices], params)
        except Exception:
            for row, of_row in zip(rows, params, strict=True):
                one = slice(row, row + 1)
                try:
                    logits[one] = processor(logits[one].clone(), [of_row])
                except Exception:
                    logger.exception("logit processor %s failed", type(processor).__name__)
                    failed[row] = True
    return failed


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


def check_logit_processor(recv_req: Any) -> None:
    """Make a request's custom logit processor once, which SGLang keeps.

    Raises:
        ValueError: it cannot be made; in a batch, that would end the scheduler process.
    """
    processor = getattr(recv_req, "custom_logit_processor", None)  # Embeddings have none.
    if processor is not None:
        try:
            CustomLogitProcessor.from_str(processor)
        except Exception as error:
            raise ValueError(f"custom_logit_processor: {type(error).__name__}: {error}") from error
