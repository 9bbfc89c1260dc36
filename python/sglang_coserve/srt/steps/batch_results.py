"""What the results of a batch are to its requests: found in one walk, for all who ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_coserve.srt.marks.request_marks import is_offline
from sglang_coserve.srt.steps.request_ledger import RequestLedger

__all__ = ["BatchResults"]

Req = Any


@dataclass(slots=True)
class BatchResults:
    """The results of a batch; the sequences are kept by who asks, and must not change."""

    reqs: Sequence[Req]
    """Its requests, in its order."""

    has_token: list[bool] = field(default_factory=list)
    """Which of them got a token."""

    offline: list[bool] = field(default_factory=list)
    """Which of them are offline."""

    ended: list[Req] = field(default_factory=list)
    first_online: list[Req] = field(default_factory=list)
    """Online requests that got their first token."""

    online_decodes: int = 0
    """Online requests that got a later one."""

    gave_offline: bool = False
    """Whether an offline request got a token."""

    @classmethod
    def of(
        cls, reqs: Sequence[Req], tokens_before: Sequence[int], ledger: RequestLedger
    ) -> BatchResults:
        """Return the results of a batch that was just processed. O(requests).

        ``tokens_before`` are the output tokens that each of ``reqs`` had before it.
        """
        results = cls(reqs)
        for req, before in zip(reqs, tokens_before, strict=True):
            live, tokens = ledger.live(req), len(req.output_ids)
            # One that has ended may be in one more batch, which SGLang has begun by then.
            offline = is_offline(req) if live is None else not live.is_online
            results.offline.append(offline)
            results.has_token.append(tokens > before)
            if req.finished():
                results.ended.append(req)
            if tokens <= before:
                continue
            if offline:
                results.gave_offline = True
            elif tokens == 1:
                results.first_online.append(req)
            else:
                results.online_decodes += 1
        return results
