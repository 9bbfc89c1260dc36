"""What offline work would get of an engine that has nothing else to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sglang_coserve.core.batch_stats import BatchStats
from sglang_coserve.core.latency_model import LatencyModel

__all__ = ["expected_tokens_per_s", "lines_at_a_time"]

_PROMPT_TOKENS: Final = 256
_OUTPUT_TOKENS: Final = 256
"""Of the requests that are assumed: nobody has sent any yet."""


def expected_tokens_per_s(
    model: LatencyModel, *, kv_tokens: int, max_rows: int, chunk_tokens: int
) -> float:
    """Return prompt and generated tokens a second of many requests of middle length.

    As many of them decode together as ``kv_tokens`` and ``max_rows`` allow, and prompts
    are computed in batches of ``chunk_tokens``: the first guess, before anything was
    served, of a rate that is measured from then on.
    """
    rows = max(1, min(max_rows, kv_tokens // (_PROMPT_TOKENS + _OUTPUT_TOKENS)))
    prompts = max(1, min(rows, chunk_tokens // _PROMPT_TOKENS))
    prefill_s = model.predict(BatchStats.of(prefills=[(_PROMPT_TOKENS, 0)] * prompts)) / prompts
    middle_tokens = _PROMPT_TOKENS + _OUTPUT_TOKENS // 2
    decode_s = model.predict(BatchStats.of(decodes=[middle_tokens] * rows)) / rows
    return (_PROMPT_TOKENS + _OUTPUT_TOKENS) / (prefill_s + _OUTPUT_TOKENS * decode_s)


def lines_at_a_time(*, kv_tokens: int, rows: int, lengths: Sequence[int]) -> int:
    """Return how many offline requests fit into so much KV and so many rows.

    ``lengths`` are those of the requests that are there, prompts and outputs, in tokens.
    """
    count, tokens = len(lengths), sum(lengths)
    if not tokens:
        count, tokens = 1, _PROMPT_TOKENS + _OUTPUT_TOKENS
    return max(0, min(rows, kv_tokens * count // tokens))
