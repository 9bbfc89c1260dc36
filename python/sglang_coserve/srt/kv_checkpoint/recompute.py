"""How many tokens are computed twice: the recompute tax of preemption."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sglang_coserve.core.request import RequestClass
from sglang_coserve.srt.request_marks import is_offline

__all__ = ["RecomputeMeter"]

Req = Any
ScheduleBatch = Any


class RecomputeMeter:
    """Counts the tokens that batches compute, and those that had been computed before."""

    def __init__(self) -> None:
        self._computed_to: dict[str, int] = {}
        self.computed_tokens: Counter[RequestClass] = Counter()
        self.recomputed_tokens: Counter[RequestClass] = Counter()

    def ran(self, batch: ScheduleBatch) -> None:
        """Count a batch whose results are in; O(rows)."""
        if not batch.forward_mode.is_extend():
            for req in batch.reqs:
                self._count(req, self._computed_to.get(req.rid, 0), 1)
            return
        for req, begin, tokens in zip(
            batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True
        ):
            self._count(req, begin, tokens)

    def _count(self, req: Req, begin: int, tokens: int) -> None:
        request_class = RequestClass.OFFLINE if is_offline(req) else RequestClass.ONLINE
        before = self._computed_to.get(req.rid, 0)
        self.computed_tokens[request_class] += tokens
        # The first tokens of a request may come from the cache: they count as computed then.
        self.recomputed_tokens[request_class] += max(0, min(before, begin + tokens) - begin)
        self._computed_to[req.rid] = max(before, begin + tokens)
        if req.finished():
            del self._computed_to[req.rid]

    def forget(self, rid: str) -> None:
        """Drop a request that ended while it waited."""
        self._computed_to.pop(rid, None)

    def tax(self, request_class: RequestClass) -> float:
        """Return the tokens computed twice as a part of all that were computed."""
        computed = self.computed_tokens[request_class]
        return self.recomputed_tokens[request_class] / computed if computed else 0.0
