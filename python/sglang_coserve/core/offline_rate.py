"""Estimates the throughput of offline work on an otherwise idle engine."""

from __future__ import annotations

from typing import Final

from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.step_stats import StepStats

__all__ = ["expected_tokens_per_s", "lines_at_a_time"]

_PROMPT_TOKENS: Final = 256
_OUTPUT_TOKENS: Final = 256
"""Assumed lengths, as no request has been seen yet."""


def expected_tokens_per_s(
    model: LatencyModel, *, kv_tokens: int, max_requests: int, chunk_tokens: int
) -> float:
    """Return the predicted prompt and output tokens per second of many medium-sized requests.

    As many of them decode together as ``kv_tokens`` and ``max_requests`` allow, and prompts
    are computed in batches of ``chunk_tokens``. This is the initial estimate of a rate that is
    measured once requests are served.
    """
    requests = max(1, min(max_requests, kv_tokens // (_PROMPT_TOKENS + _OUTPUT_TOKENS)))
    prompts = max(1, min(requests, chunk_tokens // _PROMPT_TOKENS))
    prefill_s = model.predict(StepStats.of(prefills=[(_PROMPT_TOKENS, 0)] * prompts)) / prompts
    middle_tokens = _PROMPT_TOKENS + _OUTPUT_TOKENS // 2
    decode_s = model.predict(StepStats.of(decodes=[middle_tokens] * requests)) / requests
    return (_PROMPT_TOKENS + _OUTPUT_TOKENS) / (prefill_s + _OUTPUT_TOKENS * decode_s)


def lines_at_a_time(*, kv_tokens: int, requests: int, lines: int, line_tokens: int) -> int:
    """Return how many offline requests fit into ``kv_tokens`` of KV and so many requests.

    Their mean length is that of the ``lines`` that are there: ``line_tokens`` of prompts and
    outputs together. Without any a medium length is assumed.
    """
    if not line_tokens:
        lines, line_tokens = 1, _PROMPT_TOKENS + _OUTPUT_TOKENS
    return max(0, min(requests, kv_tokens * lines // line_tokens))
