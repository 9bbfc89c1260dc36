"""A continued prefill that computes as many tokens as a plan says, beside other prefills.

SGLang gives the request whose prefill is unfinished all that is left of the
chunk's size, so nothing can run beside it but what it leaves over. A plan may
want less of it: an offline prompt goes on in what an online prompt leaves.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from sglang_coserve.srt import compat

__all__ = ["install_chunk_limits", "limit_next_chunk"]

Req = Any

_LIMIT = "coserve_chunk_tokens"


def install_chunk_limits() -> None:
    """Let SGLang's scheduler of this process heed ``limit_next_chunk``. Idempotent."""
    compat.replace("sglang.srt.managers.scheduler.PrefillAdder", _LimitedAdder)


def limit_next_chunk(req: Req, tokens: int) -> None:
    """Bound the chunk of ``req`` in the next pass, which is to continue its prefill.

    Args:
        req: a request whose prefill has begun.
        tokens: at least a page; whole pages unless it is all of the rest.
    """
    setattr(req, _LIMIT, tokens)


class _LimitedAdder(PrefillAdder):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As SGLang's, but in a sliding window's pool, too, the slots that the decodes of a mixed
        batch open are not for its prefills. O(rows)."""
        super().__init__(*args, **kwargs)
        if self.is_hybrid_swa and compat.is_mixed(self):
            rows = filter(compat.holds_kv, self.running_batch.reqs)
            opened = sum(req.kv.kv_allocated_len % self.page_size == 0 for req in rows)
            compat.reserve_window_slots(self, opened * self.page_size)

    def add_chunked_req(self, req: Req) -> Req | None:
        """Offer a continued prefill no more than its limit; the rest is for others."""
        limit_tokens = req.__dict__.pop(_LIMIT, None)
        if limit_tokens is None or self.rem_chunk_tokens is None:
            return super().add_chunked_req(req)
        others_tokens = max(self.rem_chunk_tokens - limit_tokens, 0)
        self.rem_chunk_tokens -= others_tokens
        unfinished = super().add_chunked_req(req)
        self.rem_chunk_tokens += others_tokens
        return unfinished

    def add_one_req(
        self, req: Req, has_chunked_req: bool, truncation_align_size: int | None
    ) -> AddReqResult:
        """Refuse what would be a second unfinished prefill, which ends SGLang's scheduler.

        In a pool of a sliding window, where SGLang cuts a chunk for which there is no room, it
        would forget the first.
        """
        if has_chunked_req or self.new_chunked_req is not None:
            with self._lock_node(req.last_node):
                if self._is_cut(req):
                    return AddReqResult.OTHER
        return super().add_one_req(req, has_chunked_req, truncation_align_size)

    def _is_cut(self, req: Req) -> bool:
        """Return whether SGLang would compute less than the rest of a prompt."""
        if self.rem_chunk_tokens is None:
            return False
        rest_tokens = self.ceil_paged_tokens(
            len(req.full_untruncated_fill_ids) - compat.prefix_tokens(req)
        )
        if rest_tokens > self.rem_chunk_tokens:
            return True
        return bool(self.is_hybrid_swa) and compat.exceeds_window_pool(self, req, rest_tokens)
