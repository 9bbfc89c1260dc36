"""Mends requests and results on which SGLang would fail for all requests."""

from __future__ import annotations

from typing import Any

__all__ = [
    "check_logit_processor",
    "fill_token_ids_logprobs",
    "lowest_priority",
    "refused_request",
]


def fill_token_ids_logprobs(logits_output: Any) -> None:
    """Correct the result of a batch in which only some requests asked for ``token_ids_logprob``.

    SGLang 0.5.17 gives the others a plain list where it then wants a tensor, and its
    scheduler process dies of that (sgl-project/sglang#34719).
    """
    import torch

    values = logits_output.next_token_token_ids_logprobs_val
    for i, value in enumerate(values or ()):
        if not torch.is_tensor(value):
            values[i] = torch.tensor(value)


def check_logit_processor(recv_req: Any) -> None:
    """Make a request's custom logit processor once, which SGLang keeps.

    Raises:
        ValueError: it cannot be made; in a batch, that would end the scheduler process.
    """
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    if recv_req.custom_logit_processor is not None:
        try:
            CustomLogitProcessor.from_str(recv_req.custom_logit_processor)
        except Exception as error:
            raise ValueError(f"custom_logit_processor: {type(error).__name__}: {error}") from error


def refused_request(recv_req: Any, tokenizer: Any, vocab_size: int, message: str) -> Any:
    """Return a ``Req`` that SGLang answers with a 400 and ``message``."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=1)
    params.normalize(tokenizer)
    req = Req(
        recv_req.rid,
        None,
        recv_req.input_ids,
        params,
        stream=recv_req.stream,
        vocab_size=vocab_size,
        http_worker_ipc=recv_req.http_worker_ipc,
    )
    req.tokenizer = tokenizer
    req.set_finish_with_abort(message)
    return req


def lowest_priority(low_values_first: bool) -> int:
    """Return the lowest ``Req.priority``."""
    import sys

    return sys.maxsize if low_values_first else -sys.maxsize - 1
