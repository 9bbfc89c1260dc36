"""Counts tokens that are computed twice: the recompute tax of retraction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from sglang_coserve.core.request import RequestClass
from sglang_coserve.srt.forward_kind import prefilled

Req = Any
ScheduleBatch = Any

_ALL: Final = -1
"""Value for a request of which all tokens except the last have been computed."""


class RecomputeMeter:
    """Counts the tokens that batches compute, and those that had been computed before.

    Decodes compute nothing twice, and are only counted, which keeps the meter cheap.
    """

    def __init__(self) -> None:
        self._computed_to: dict[str, int] = {}
        self._computed_tokens: Counter[RequestClass] = Counter()
        self._recomputed_tokens: Counter[RequestClass] = Counter()

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
        self._computed_tokens[RequestClass.OFFLINE] += num_offline
        self._computed_tokens[RequestClass.ONLINE] += len(offline) - num_prefills - num_offline

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
        self._computed_tokens[request_class] += tokens
        self._recomputed_tokens[request_class] += max(0, min(before, end) - begin)

    def forget(self, rid: str) -> None:
        """Drop a request that has ended."""
        self._computed_to.pop(rid, None)

    def state(self) -> dict[str, dict[str, float]]:
        """Return what ``/coserve/status`` says of each class (docs/metrics.md). O(1)."""
        return {
            request_class.value: {
                "computed_tokens": (computed := self._computed_tokens[request_class]),
                "recomputed_tokens": (again := self._recomputed_tokens[request_class]),
                "tax": again / computed if computed else 0.0,
            }
            for request_class in RequestClass
        }
