"""How many tokens are computed twice: the recompute tax of preemption."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from sglang_coserve.core.request import RequestClass

__all__ = ["RecomputeMeter"]

Req = Any
ScheduleBatch = Any

_ALL: Final = -1
"""All tokens of a request but the last have been computed."""


class RecomputeMeter:
    """Counts the tokens that batches compute, and those that had been computed before.

    Runs whether KV is checkpointed or not, for it tells whether that is worth while. So
    decodes, which compute nothing twice, are counted, not looked at one by one.
    """

    def __init__(self) -> None:
        self._computed_to: dict[str, int] = {}
        self.computed_tokens: Counter[RequestClass] = Counter()
        self.recomputed_tokens: Counter[RequestClass] = Counter()

    def ran(self, batch: ScheduleBatch, offline: Sequence[bool]) -> None:
        """Count a batch whose results are in; ``offline`` tells the class of each row."""
        if batch.forward_mode.is_extend():
            for row in zip(batch.reqs, offline, batch.prefix_lens, batch.extend_lens, strict=True):
                self._prefilled(*row)
            return
        num_offline = sum(offline)
        self.computed_tokens[RequestClass.OFFLINE] += num_offline
        self.computed_tokens[RequestClass.ONLINE] += len(offline) - num_offline

    def _prefilled(self, req: Req, offline: bool, begin: int, tokens: int) -> None:
        """Count a row that has computed ``tokens`` tokens behind the first ``begin``."""
        end = begin + tokens
        is_whole = end >= len(req.origin_input_ids) + len(req.output_ids) - 1
        before = self._computed_to.get(req.rid, 0)
        if before == _ALL:
            # Of a whole one, the last token is new: what came out before.
            before = end - is_whole
        else:
            # The first tokens of a request may come from the cache: they count as computed then.
            self._computed_to[req.rid] = _ALL if is_whole else max(before, end)
        request_class = RequestClass.OFFLINE if offline else RequestClass.ONLINE
        self.computed_tokens[request_class] += tokens
        self.recomputed_tokens[request_class] += max(0, min(before, end) - begin)

    def forget(self, rid: str) -> None:
        """Drop a request that has ended."""
        self._computed_to.pop(rid, None)

    def tax(self, request_class: RequestClass) -> float:
        """Return the tokens computed twice as a part of all that were computed."""
        computed = self.computed_tokens[request_class]
        return self.recomputed_tokens[request_class] / computed if computed else 0.0
