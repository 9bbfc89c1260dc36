"""Makes SGLang's own admission admit exactly the planned prefill chunks.

Chunks that SGLang cannot run together are left for a later step: it continues only one unfinished
prefill at a time. And it gives that one as many tokens of the chunk size as it can use, other
prompts only what is left. A plan may want the opposite: an offline prompt continues in what an
online prompt leaves. So the continued chunk is limited to the planned tokens.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from sglang_coserve.srt import compat

Req = Any
ScheduleBatch = Any

_LIMIT = "coserve_chunk_tokens"


def install_chunk_limits() -> None:
    """Make SGLang's scheduler in this process observe ``limit_next_chunk``. Idempotent."""
    compat.replace("sglang.srt.managers.scheduler.PrefillAdder", _LimitedAdder)


def limit_next_chunk(req: Req, tokens: int) -> None:
    """Limit the chunk of ``req`` in the next batch, which is to continue its prefill.

    ``tokens`` is at least a page, and whole pages unless it completes the prompt.
    """
    setattr(req, _LIMIT, tokens)


class _LimitedAdder(PrefillAdder):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Like SGLang's adder, but also reserve, in the pool of a sliding window, the slots that
        the decodes of a mixed batch need. O(requests)."""
        super().__init__(*args, **kwargs)
        if self.is_hybrid_swa and compat.is_mixed(self):
            requests = filter(compat.holds_kv, self.running_batch.reqs)
            opened = sum(req.kv.kv_allocated_len % self.page_size == 0 for req in requests)
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
        return super().add_one_req(req, has_chunked_req, truncation_align_size)

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


def correct_mixed_prefix_lens(batch: ScheduleBatch) -> None:
    """Set the prefix lengths of the decodes in a mixed batch to their lengths - 1.

    Under overlap scheduling SGLang assumes that every such decode has a token in flight; one
    that skipped a step has none.
    """
    if not batch.forward_mode.is_mixed():
        return
    count = len(batch.decoding_reqs)
    if count:
        lens = (batch.seq_lens_cpu[-count:] - 1).tolist()
        batch.prefix_lens = [*batch.prefix_lens[:-count], *lens]
