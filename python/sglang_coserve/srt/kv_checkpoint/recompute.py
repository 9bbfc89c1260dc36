"""Measures how many tokens are computed twice: the recompute tax of retraction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from sglang_coserve.core.request import RequestClass
from sglang_coserve.srt.forward_kind import prefilled

__all__ = ["RecomputeMeter"]

Req = Any
ScheduleBatch = Any

_ALL: Final = -1
"""Value for a request of which all tokens except the last have been computed."""


class RecomputeMeter:
    """Counts the tokens that batches compute, and those that had been computed before.

    Runs whether KV is checkpointed or not, as it shows whether that is worthwhile. To be cheap,
    it only counts decodes, which compute nothing twice.
    """

    def __init__(self) -> None:
        self._computed_to: dict[str, int] = {}
        self.computed_tokens: Counter[RequestClass] = Counter()
        self.recomputed_tokens: Counter[RequestClass] = Counter()

    def ran(self, batch: ScheduleBatch, offline: Sequence[bool]) -> None:
        """Count a batch whose results are in; ``offline`` says which requests are offline."""
        num_prefills = 0
        if batch.forward_mode.is_extend():
            prefills = prefilled(batch)
            num_prefills = len(prefills)
            lens = zip(batch.prefix_lens, batch.extend_lens, strict=True)
            for req, is_offline, (begin, tokens) in zip(prefills, offline, lens, strict=False):
                self._prefilled(req, is_offline, begin, tokens)
        num_offline = sum(offline[num_prefills:])
        self.computed_tokens[RequestClass.OFFLINE] += num_offline
        self.computed_tokens[RequestClass.ONLINE] += len(offline) - num_prefills - num_offline

    def _prefilled(self, req: Req, offline: bool, begin: int, tokens: int) -> None:
        """Count a request that has computed ``tokens`` tokens after the first ``begin``."""
        end = begin + tokens
        is_whole = end >= len(req.origin_input_ids) + len(req.output_ids) - 1
        before = self._computed_to.get(req.rid, 0)
        if before == _ALL:
            # If the request is complete now, its last token was not computed before.
            before = end - is_whole
        elif not req.finished():
            # Tokens found in the cache count as computed at this point. One that was aborted
            # between two chunks may be forgotten already.
            self._computed_to[req.rid] = _ALL if is_whole else max(before, end)
        request_class = RequestClass.OFFLINE if offline else RequestClass.ONLINE
        self.computed_tokens[request_class] += tokens
        self.recomputed_tokens[request_class] += max(0, min(before, end) - begin)

    def forget(self, rid: str) -> None:
        """Drop a request that has ended."""
        self._computed_to.pop(rid, None)

    def tax(self, request_class: RequestClass) -> float:
        """Return the share of the computed tokens that had been computed before."""
        computed = self.computed_tokens[request_class]
        return self.recomputed_tokens[request_class] / computed if computed else 0.0
