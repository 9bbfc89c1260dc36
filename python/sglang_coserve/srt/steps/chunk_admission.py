"""Makes SGLang's own admission admit exactly the planned prefill chunks.

Chunks that SGLang cannot run together are left for a later step: it continues only one unfinished
prefill at a time. And it gives that one as many tokens of the chunk size as it can use, other
prompts only what is left. A plan may want the opposite: an offline prompt continues in what an
online prompt leaves. So the continued chunk is limited to the planned tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from sglang_coserve.core.step import PrefillChunk
from sglang_coserve.srt import compat
from sglang_coserve.srt.forward_kind import prefilled
from sglang_coserve.srt.steps.engine_view import EngineView
from sglang_coserve.srt.steps.offline_retraction import OfflineRetraction, Prefill

Req = Any

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


ScheduleBatch = Any


class ChunkAdmission:
    """Offers SGLang's admission exactly the requests that the next batch should have.

    ``install_chunk_limits`` must have been called in this process.
    """

    def __init__(
        self,
        view: EngineView,
        retraction: OfflineRetraction,
        events: Counter[str],
        page_tokens: int,
    ) -> None:
        self._view = view
        self._retraction = retraction
        self._events = events
        self._page_tokens = page_tokens

    def executable(self, chunks: Iterable[PrefillChunk]) -> list[PrefillChunk]:
        """Return the leading chunks that SGLang can run in one batch, in its order.

        At most one chunk continues an unfinished prefill, and it comes first.
        """
        begun = {req.rid for req in self._view.paused_requests.parked}
        if self._view.chunk is not None:
            begun.add(self._view.chunk.rid)
        continued: list[PrefillChunk] = []
        started: list[PrefillChunk] = []
        for chunk in chunks:
            if chunk.rid not in begun:
                started.append(chunk)
            elif continued:
                break
            else:
                continued.append(chunk)
        return [*continued, *started]

    def run(
        self,
        chunks: Sequence[PrefillChunk],
        offline_reqs: Mapping[str, Req],
        running_batch: ScheduleBatch,
        prefill: Prefill,
        *,
        mixes_decodes: bool,
    ) -> tuple[Any, tuple[PrefillChunk, ...]]:
        """Offer exactly these ``executable`` chunks to SGLang, with its decodes or without.

        Returns SGLang's plan, and the admitted chunks with their real lengths, which exceed the
        planned ones if the cache has lost a prefix since.
        """
        view = self._view
        self._choose_chunk(chunks)
        begun = None if view.chunk is None else view.chunk.rid
        offline = [offline_reqs[c.rid] for c in chunks if c.rid in offline_reqs]
        rids = [c.rid for c in chunks if c.rid not in offline_reqs and c.rid != begun]
        view.offer_only([*view.waiting_with(rids), *offline], offline)
        result = self._admit(chunks, running_batch, prefill, mixes_decodes)
        _, num_admitted = view.withdraw()
        self._events["admitted"] += num_admitted
        # The queue then has what was not admitted, what was hidden, and what arrived meanwhile.
        view.show_again()
        if result.batch_to_run is None:
            return result, ()
        batch = result.batch_to_run
        _correct_mixed_prefix_lens(batch)
        rids = [req.rid for req in prefilled(batch)]
        tokens = dict(zip(rids, batch.extend_lens, strict=False))
        # What is in no batch was not admitted, or SGLang has refused it meanwhile.
        admitted = (chunk for chunk in chunks if chunk.rid in tokens)
        return result, tuple(chunk._replace(tokens=tokens[chunk.rid]) for chunk in admitted)

    def _choose_chunk(self, chunks: Sequence[PrefillChunk]) -> None:
        """Make the prefill that these chunks continue, if any, SGLang's unfinished one."""
        view = self._view
        unfinished = view.chunk
        if unfinished is not None and unfinished.rid not in {chunk.rid for chunk in chunks}:
            self.park_chunk()
        if chunks and view.paused_requests.is_parked(chunks[0].rid):
            assert view.chunk is None
            view.put_chunk(view.paused_requests.unpark(chunks[0].rid))
        if view.chunk is not None:
            limit_next_chunk(view.chunk, chunks[0].tokens)

    def park_chunk(self) -> None:
        """Park the unfinished prefill, unless there is none or SGLang is aborting it."""
        if self._view.can_take_chunk:
            self._view.paused_requests.park(self._view.take_chunk())
            self._events["parked"] += 1

    def _admit(
        self,
        chunks: Sequence[PrefillChunk],
        running_batch: ScheduleBatch,
        prefill: Prefill,
        mixes_decodes: bool,
    ) -> Any:
        """Let SGLang build a batch of these chunks, with all decodes or with none."""
        # SGLang counts whole pages; a plan counts only the tokens in a prompt's last page.
        page = self._page_tokens
        tokens = sum(-(-chunk.tokens // page) * page for chunk in chunks)
        # SGLang subtracts the decodes of a mixed batch from the chunk size.
        num_decodes = len(running_batch.reqs) if mixes_decodes else 0
        running_batch.batch_is_full = False
        with self._view.chunk_size(max(tokens, page) + num_decodes, mixes_decodes=mixes_decodes):
            # This may retract requests: SGLang also reserves room for a request's output.
            return self._retraction.admit(running_batch, prefill)


def _correct_mixed_prefix_lens(batch: ScheduleBatch) -> None:
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
