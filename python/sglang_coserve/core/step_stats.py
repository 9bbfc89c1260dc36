"""Summarizes a batch for the latency models, in constant space.

Every latency model here is a function of sums over the requests. A scheduler that tries
thousands of batches in a step extends the sums instead of walking all requests: adding a request
and predicting are O(1).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class StepStats(NamedTuple):
    """Sums over the requests of the batch of one step.

    A request has P tokens to compute and C tokens already in the KV
    cache (ConServe §4.2). A decode request has P = 1; a prefill chunk any P ≥ 1.
    """

    prefill_requests: int = 0
    """HyGen's N_p: requests that compute prompt tokens."""

    prefill_tokens: int = 0
    """HyGen's S_p: ΣP over prefill requests."""

    prefill_context_tokens: int = 0
    """ΣC over prefill requests: tokens cached before this chunk."""

    prefill_attention_pairs: int = 0
    """ΣP·(P + C) over prefill requests: query–key pairs, ConServe's attention term."""

    decode_requests: int = 0
    """HyGen's N_d: requests that produce one token from one token."""

    decode_context_tokens: int = 0
    """HyGen's S_d: Σ(C + 1) over decode requests, the keys each of them reads."""

    @property
    def compute_tokens(self) -> int:
        """ConServe's ΣP: tokens that pass through the linear layers."""
        return self.prefill_tokens + self.decode_requests

    @property
    def attention_pairs(self) -> int:
        """ΣP·(P + C) over all requests; a decode request contributes C + 1."""
        return self.prefill_attention_pairs + self.decode_context_tokens

    @property
    def total_tokens(self) -> int:
        """Σ(P + C) over all requests: KV entries read."""
        return self.prefill_tokens + self.prefill_context_tokens + self.decode_context_tokens

    @property
    def is_empty(self) -> bool:
        """True when the batch has no request."""
        return self.prefill_requests == 0 and self.decode_requests == 0

    def with_prefill(self, tokens: int, context_tokens: int) -> StepStats:
        """Return this batch with one more request that computes ``tokens`` prompt tokens."""
        assert tokens > 0, f"a prefill computes at least one token, got {tokens}"
        assert context_tokens >= 0, f"negative context: {context_tokens}"
        requests, all_tokens, context, pairs, decodes, keys = self
        more_pairs = tokens * (tokens + context_tokens)
        sums = requests + 1, all_tokens + tokens, context + context_tokens, pairs + more_pairs
        # Like StepStats(), at half the cost: a plan tries dozens of chunks.
        return tuple.__new__(StepStats, (*sums, decodes, keys))

    def with_decode(self, context_tokens: int) -> StepStats:
        """Return this batch with one more decode request of ``context_tokens`` cached tokens."""
        return self.with_decodes(1, context_tokens)

    def with_decodes(self, count: int, context_tokens: int) -> StepStats:
        """Return this batch with ``count`` more decode requests, whose cached tokens add up to
        ``context_tokens``."""
        assert context_tokens >= 0, f"negative context: {context_tokens}"
        return StepStats(
            self.prefill_requests,
            self.prefill_tokens,
            self.prefill_context_tokens,
            self.prefill_attention_pairs,
            self.decode_requests + count,
            self.decode_context_tokens + context_tokens + count,
        )

    @classmethod
    def of(cls, prefills: Iterable[tuple[int, int]] = (), decodes: Iterable[int] = ()) -> StepStats:
        """Return the sums over requests: (P, C) of each prefill, C of each decode. O(requests)."""
        stats = cls()
        for tokens, context_tokens in prefills:
            stats = stats.with_prefill(tokens, context_tokens)
        contexts = list(decodes)
        return stats.with_decodes(len(contexts), sum(contexts))
