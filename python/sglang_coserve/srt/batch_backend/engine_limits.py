"""What SGLang does not check of a request, and the scheduler process does not survive.

A server that ends so is started again, and resumes its batches: without these
checks one line could end it over and over.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["check_engine_limits"]

_MOST_CHOICES: Final = 128
"""As OpenAI allows; SGLang holds all of them at once."""

_MOST_BIAS: Final = 1e30
"""Fits the engine's 32-bit floats, with room for the logit it is added to."""


def check_engine_limits(request: Any, vocab_size: int) -> None:
    """Check a ``GenerateReqInput`` or ``EmbeddingReqInput`` that is not yet normalised.

    Raises:
        ValueError: it has token ids outside the vocabulary, or values no model can use.
    """
    # Placeholders of images and sounds are outside of it on purpose.
    if not request.contains_mm_input():
        _check_token_ids("prompt", request.input_ids, vocab_size)
    params = request.sampling_params or {}
    _check_token_ids("stop_token_ids", params.get("stop_token_ids"), vocab_size)
    for token, bias in (params.get("logit_bias") or {}).items():
        if not -_MOST_BIAS <= bias <= _MOST_BIAS:
            raise ValueError(f"the logit_bias of {token} is {bias}: use -100 to 100")
    if not 1 <= params.get("n", 1) <= _MOST_CHOICES:
        raise ValueError(f"n is {params['n']}: use 1 to {_MOST_CHOICES}")
    num_logprobs = getattr(request, "top_logprobs_num", None) or 0
    if not 0 <= num_logprobs <= vocab_size:
        raise ValueError(f"{num_logprobs} top logprobs: use 0 to {vocab_size}")


def _check_token_ids(name: str, token_ids: Any, vocab_size: int) -> None:
    if not token_ids:
        return
    for row in token_ids if isinstance(token_ids[0], list) else [token_ids]:
        if row and not (min(row) >= 0 and max(row) < vocab_size):
            raise ValueError(f"{name}: token ids of this model are 0 to {vocab_size - 1}")
