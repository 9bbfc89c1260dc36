"""SGLang's scheduler with passes whose prefill chunks are chosen beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglang_coserve.core.step import PrefillChunk
from sglang_coserve.srt.chunk_limit import install_chunk_limits, limit_next_chunk
from sglang_coserve.srt.holding_scheduler import HoldingScheduler

__all__ = ["DirectedScheduler"]

Req = Any
ScheduleBatch = Any


class DirectedScheduler(HoldingScheduler):
    """Offers SGLang's own admission what the next batch is to have, and nothing else.

    What SGLang cannot do is left out of a batch, never imitated: it continues one
    unfinished prefill at a time.
    """

    # State of SGLang's that is assigned here too.
    is_mixed_chunk: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Start SGLang's scheduler, with chunks that may end where they are told."""
        install_chunk_limits()
        super().__init__(*args, **kwargs)

    def _executable(self, chunks: Iterable[PrefillChunk]) -> list[PrefillChunk]:
        """Return the leading chunks that SGLang can run in one pass, in its order: one that
        continues a prefill goes first, and there can be no second one."""
        begun = {req.rid for req in self._aside.parked}
        if self.chunked_req is not None:
            begun.add(self.chunked_req.rid)
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

    def _run_chunks(
        self,
        chunks: Sequence[PrefillChunk],
        offline_reqs: Mapping[str, Req],
        running_batch: ScheduleBatch,
        *,
        mixes_decodes: bool,
    ) -> tuple[Any, tuple[PrefillChunk, ...]]:
        """Offer exactly these chunks to SGLang.

        Args:
            chunks: As of ``_executable``.
            offline_reqs: The waiting offline requests by rid.
            running_batch: SGLang's decodes.
            mixes_decodes: Whether they run in the same batch.

        Returns:
            SGLang's own plan, and the chunks that it admitted.
        """
        if self.chunked_req is not None and self.chunked_req.rid not in {c.rid for c in chunks}:
            self._park_chunk()
        if chunks and self._aside.is_parked(chunks[0].rid):
            assert self.chunked_req is None
            self.chunked_req = self._aside.unpark(chunks[0].rid)
        if self.chunked_req is not None:
            limit_next_chunk(self.chunked_req, chunks[0].tokens)
        online = {req.rid: req for req in self.waiting_queue}
        chosen = [online.get(c.rid) or offline_reqs.get(c.rid) for c in chunks]
        shown = [req for req in chosen if req is not None]
        hidden = [req for req in self.waiting_queue if req not in shown]
        self._offered = [req for req in shown if req.rid not in online]
        self.waiting_queue = shown
        # SGLang compares and counts whole pages, a plan those of a prompt's end not.
        page = self.page_size
        tokens = sum(-(-chunk.tokens // page) * page for chunk in chunks)
        result = self._admit_chunks(running_batch, tokens, mixes_decodes)
        left = {req.rid for req in (*self._withdraw_offer(), *self.waiting_queue)}
        # What the pass left over, what it was not shown, and what arrived meanwhile.
        self.waiting_queue = sorted(
            [*self.waiting_queue, *hidden], key=lambda req: req.time_stats.wait_queue_entry_time
        )
        if result.batch_to_run is None:
            return result, ()
        _correct_mixed_prefix_lens(result.batch_to_run)
        return result, tuple(chunk for chunk in chunks if chunk.rid not in left)

    def _admit_chunks(self, running_batch: ScheduleBatch, tokens: int, mixes_decodes: bool) -> Any:
        """Let SGLang build a batch of ``tokens`` prefill tokens, with all decodes or without."""
        size, mixed = self.chunked_prefill_size, self.is_mixed_chunk
        running_batch.batch_is_full = False
        try:
            self.is_mixed_chunk = mixes_decodes
            # SGLang takes the decodes of a mixed batch off the size of the chunk.
            num_decodes = len(running_batch.reqs) if mixes_decodes else 0
            self.chunked_prefill_size = max(tokens, self.page_size) + num_decodes
            # It may evict: SGLang also reserves room for a request's output, a plan does not.
            return self._admit(running_batch)
        finally:
            self.chunked_prefill_size, self.is_mixed_chunk = size, mixed


def _correct_mixed_prefix_lens(batch: ScheduleBatch) -> None:
    """SGLang takes for granted that every decode of a mixed batch has a token in flight under
    overlap scheduling; one that sat out an iteration has none. Its context is its length - 1."""
    if not batch.forward_mode.is_mixed():
        return
    count = len(batch.decoding_reqs)
    if count:
        lens = (batch.seq_lens_cpu[-count:] - 1).tolist()
        batch.prefix_lens = [*batch.prefix_lens[:-count], *lens]
