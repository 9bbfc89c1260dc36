"""What SGLang does not check of a request, and the scheduler process does not survive.

One request could end the server for all, and a line of a batch over and over, since a
server that is started again resumes its batches.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["check_engine_limits", "check_fatal_values"]

_MOST_CHOICES: Final = 128
"""As OpenAI allows; SGLang holds all of them at once."""

_MOST_BIAS: Final = 1e30
"""Fits the engine's 32-bit floats, with room for the logit it is added to."""


def check_engine_limits(request: Any, vocab_size: int) -> None:
    """Check the ``GenerateReqInput`` or ``EmbeddingReqInput`` of a line, not yet normalised.

    Raises:
        ValueError: it has values no model can use, or asks for too many choices.
    """
    check_fatal_values(request, vocab_size)
    n = (request.sampling_params or {}).get("n", 1)
    if not 1 <= n <= _MOST_CHOICES:
        raise ValueError(f"n is {n}: use 1 to {_MOST_CHOICES}")


def check_fatal_values(request: Any, vocab_size: int) -> None:
    """Check a request for values that end the scheduler process; O(prompt tokens).

    Raises:
        ValueError: it has token ids outside the vocabulary, or values no model can use.
    """
    # Placeholders of images and sounds are outside of it on purpose.
    if not request.contains_mm_input():
        _check_token_ids("prompt", request.input_ids, vocab_size)
    params = request.sampling_params or {}
    if params.get("min_new_tokens"):  # Otherwise they only never match.
        _check_token_ids("stop_token_ids", list(params.get("stop_token_ids") or ()), vocab_size)
    for token, bias in (params.get("logit_bias") or {}).items():
        if not isinstance(bias, int | float) or not -_MOST_BIAS <= bias <= _MOST_BIAS:
            raise ValueError(f"the logit_bias of {token} is {bias!r}: use -100 to 100")
    num_logprobs = getattr(request, "top_logprobs_num", None) or 0
    if not 0 <= num_logprobs <= vocab_size:
        raise ValueError(f"{num_logprobs} top logprobs: use 0 to {vocab_size}")


def _check_token_ids(name: str, token_ids: Any, vocab_size: int) -> None:
    if not token_ids:
        return
    for row in token_ids if isinstance(token_ids[0], list) else [token_ids]:
        if row and not (min(row) >= 0 and max(row) < vocab_size):
            raise ValueError(f"{name}: token ids of this model are 0 to {vocab_size - 1}")
