"""Limits of single chunks, which SGLang's own admission does not have.

SGLang gives the prefill that it continues as many tokens of the chunk size as that can use, and
other prompts the rest. A plan may want the opposite: an offline prompt continues in the tokens
that an online prompt leaves.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from sglang_coserve.srt import compat

Req = Any

_LIMIT: Final = "coserve_chunk_tokens"
"""Attribute of a request that continues its prefill next: the most tokens of its chunk."""


def install_chunk_limits(step_tokens: int | None) -> None:
    """Make SGLang's scheduler in this process observe limits of chunks. Idempotent.

    ``step_tokens`` are the most tokens of a batch with prompts, by which SGLang has made its
    buffers; None where prompts are not cut.
    """
    _LimitedAdder.step_tokens = step_tokens
    compat.replace("sglang.srt.managers.scheduler.PrefillAdder", _LimitedAdder)


def limit_chunk(req: Req, tokens: int) -> None:
    """Let a request that continues its prefill next compute at most so many tokens.

    ``tokens`` is at least a page, and whole pages unless it completes the prompt.
    """
    setattr(req, _LIMIT, tokens)


class _LimitedAdder(PrefillAdder):
    step_tokens: ClassVar[int | None] = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Like SGLang's adder, but also reserve, in the pool of a sliding window, the slots that
        the decodes of a mixed batch need. O(requests)."""
        super().__init__(*args, **kwargs)
        # Asked for now: an adder with prefills seems to be mixed in any case.
        is_mixed = compat.is_mixed(self)
        self._num_decodes = len(self.running_batch.reqs) if is_mixed else 0
        if self.is_hybrid_swa and is_mixed:
            requests = filter(compat.holds_kv, self.running_batch.reqs)
            opened = sum(compat.allocated_tokens(req) % self.page_size == 0 for req in requests)
            compat.reserve_window_slots(self, opened * self.page_size)

    def add_chunked_req(self, req: Req) -> Req | None:
        """Offer a continued prefill at most its limit; leave the rest to other prefills."""
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
        """Refuse a request that would become a second unfinished prefill, which crashes SGLang.

        With a separate pool for a sliding window, SGLang cuts a chunk that lacks room there and
        would lose track of the first unfinished prefill.
        """
        if has_chunked_req or self.new_chunked_req is not None:
            with self._lock_node(req.last_node):
                if self._is_cut(req):
                    return AddReqResult.OTHER
        kept_tokens = self._tokens_beyond_step(req)
        if kept_tokens:
            if kept_tokens >= self.rem_chunk_tokens:
                return AddReqResult.OTHER
            self.rem_chunk_tokens -= kept_tokens
        result = super().add_one_req(req, has_chunked_req, truncation_align_size)
        if kept_tokens:
            self.rem_chunk_tokens += kept_tokens
        return result

    def _tokens_beyond_step(self, req: Req) -> int:
        """Return what to keep back of the chunk size, for the step to keep its most tokens.

        The chunk size counts whole pages, and the plan counted a prefix that the cache may have
        lost since. O(requests of the batch).
        """
        if self.step_tokens is None or self.rem_chunk_tokens is None:
            return 0
        begun_tokens = sum(map(compat.new_tokens, self.can_run_list))
        room_tokens = self.step_tokens - self._num_decodes - begun_tokens
        rest_tokens = len(req.full_untruncated_fill_ids) - compat.prefix_tokens(req)
        if rest_tokens <= room_tokens:
            return 0
        whole_pages = max(room_tokens, 0) // self.page_size * self.page_size
        return int(max(self.rem_chunk_tokens - whole_pages, 0))

    def _is_cut(self, req: Req) -> bool:
        """Return whether SGLang would compute only a part of the rest of a prompt."""
        if self.rem_chunk_tokens is None:
            return False
        rest_tokens = self.ceil_paged_tokens(
            len(req.full_untruncated_fill_ids) - compat.prefix_tokens(req)
        )
        if rest_tokens > self.rem_chunk_tokens:
            return True
        return bool(self.is_hybrid_swa) and compat.exceeds_window_pool(self, req, rest_tokens)
