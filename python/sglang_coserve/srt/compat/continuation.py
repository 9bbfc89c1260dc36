"""Decides which requests can be continued from the tokens that they have generated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["STATEFUL_FIELDS", "STATEFUL_PARAMS", "can_continue"]

STATEFUL_PARAMS: Final[Mapping[str, object]] = {
    # Penalties count output tokens as they are sampled, so a continuation would count anew.
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    # The state of a grammar depends on the tokens it has read.
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    # With several choices it is unknown which one the tokens belong to.
    "n": 1,
    # A custom processor may use these in any way.
    "custom_params": None,
}
"""Sampling parameters that, unless they have this value, make sampling depend on more state than
the tokens so far."""

STATEFUL_FIELDS: Final = (
    # Outputs per token are not journaled.
    "return_logprob",
    "return_hidden_states",
    "return_routed_experts",
    "return_indexer_topk",
    "return_sampling_mask",
    # State outside the request.
    "custom_logit_processor",
    "session_id",
    "session_params",
    "input_embeds",
    "max_thinking_tokens",
    # Another adapter may have that name by then.
    "lora_path",
)
"""Fields of SGLang's request that must be unset."""


def can_continue(request: Any, preferred_params: Mapping[str, Any] | None = None) -> bool:
    """Return whether prompt and output tokens are the whole state of ``request``.

    If so, a generation that is interrupted after any token and continued gives the same result
    as one without interruption. ``request`` is SGLang's ``GenerateReqInput`` before it is
    normalised, ``preferred_params`` the server's defaults for sampling parameters.
    """
    if isinstance(request.input_ids, list):
        is_single = bool(request.input_ids) and isinstance(request.input_ids[0], int)
    else:
        is_single = isinstance(request.text, str)
    if not is_single or request.contains_mm_input():
        return False
    if any(getattr(request, field) for field in STATEFUL_FIELDS):
        return False
    params = {**(preferred_params or {}), **(request.sampling_params or {})}
    return all(
        not params.get(name) or params[name] == neutral for name, neutral in STATEFUL_PARAMS.items()
    )
