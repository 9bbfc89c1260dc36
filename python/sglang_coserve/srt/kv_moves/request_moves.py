"""Moves offline requests with their KV from one engine to another.

The engine that gives a request back writes the request's saved pages to a file, and then says that
the request has gone. The engine that takes the request reads the file into host memory, as if it
had retracted the request itself. No step waits for a move: KV that is not there in time, or not on
every rank, is computed again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from sglang_coserve.core.request import Ending
from sglang_coserve.lines.background import TaskSupervisor
from sglang_coserve.srt.admission.admission import Admission
from sglang_coserve.srt.compat import drop_ended, send_abort
from sglang_coserve.srt.kv_moves.kv_directory import is_kv_name
from sglang_coserve.srt.kv_moves.kv_files import KvFiles, KvJob
from sglang_coserve.srt.marks.offline_marks import take_moved_kv
from sglang_coserve.srt.monitoring.scheduler_query import moved_reason
from sglang_coserve.srt.steps.engine_parts import EngineParts

_YIELD_S: Final = 0.001
"""Short against a step, and against what a file takes."""

_PENDING: Final = -1
_GIVEN_UP: Final = -2
"""What a rank says of a move; otherwise the tokens that it has moved. The least counts."""

COUNTED: Final = ("moved_out_tokens", "moved_in_tokens", "moves_without_kv")
"""Counts of moves, which only grow."""

Req = Any
ScheduleBatch = Any


@dataclass(slots=True)
class _Move:
    """KV of a request that is on its way."""

    req: Req
    leaves: bool
    model: str
    """Whose KV it is."""

    since_s: float
    slots: torch.Tensor | None = None
    """On the host; None while pages of a request that leaves are still copied there."""

    job: KvJob | None = None
    """What writes or reads them; None if there is nothing to write, or not yet."""


class RequestMoves:
    """Where requests are that neither run nor wait, as their KV is on its way.

    One that leaves is retracted first, as for an online request: its KV goes to the tree and to
    the host. One that comes finds its KV there as if it had been retracted here. They are the
    same, in the same order, on all ranks, which call each method at the same point of a round.
    """

    timeout_s = 10.0
    """Longest that a request waits for its KV, on each of the two engines. It is more than a disk
    takes for some GB; what a hanging one delays is computed again."""

    def __init__(
        self,
        parts: EngineParts,
        admission: Admission,
        background: TaskSupervisor,
        forget: Callable[[Req], None],
    ) -> None:
        """``background`` reads and writes files; ``forget`` is called with requests that left."""
        self._scheduler = parts.scheduler
        self._admission = admission
        self._view = parts.view
        self._retraction = parts.retraction
        self._ledger = parts.ledger
        self._forget = forget
        self._cache = parts.scheduler.tree_cache
        self._files: KvFiles | None = None
        """None: no KV is moved."""

        if parts.config.kv_move_dir is not None:
            self._files = KvFiles(self._cache, Path(parts.config.kv_move_dir), background)
        self._asked: dict[str, str] = {}
        """The requests that are to leave, with the model that their KV is of."""

        self._moves: dict[str, _Move] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._moves)

    def figures(self) -> dict[str, int]:
        """Return what ``/coserve/status`` says of moved KV (docs/kv_checkpoint.md). O(1)."""
        return {name: self._counts[name] for name in COUNTED}

    def kept(self) -> Iterable[Req]:
        """Return the requests whose KV is on its way."""
        return [move.req for move in self._moves.values()]

    def ask(self, rids: Sequence[str], model: str) -> list[str]:
        """Let requests leave, with the KV of ``model``; return those that do.

        The KV of each is left under its rid.
        """
        known = [rid for rid in rids if self._can_leave(rid)] if self._files else []
        self._asked |= dict.fromkeys(known, model)
        return known

    def _can_leave(self, rid: str) -> bool:
        """Return whether a request is here, and neither has ended nor is about to."""
        live = self._ledger.get(rid)
        return live is not None and not live.req.finished() and live.req.to_finish is None

    def come(self, req: Req) -> bool:
        """Begin to fetch the KV that was left for a new request; False if there is none to wait
        for, or no room."""
        moved = take_moved_kv(req)
        if self._files is None or moved is None:
            return False
        name, tokens, model = moved
        has_tokens = 0 < tokens <= len(req.origin_input_ids) + len(req.output_ids)
        if not has_tokens or tokens % self._cache.page_size or not is_kv_name(name):
            return False
        slots = self._cache.expect(req.rid, tokens)
        if slots is None:
            return False
        job = self._files.begin_read(name, req, slots, model)
        self._moves[req.rid] = _Move(req, False, model, time.monotonic(), slots, job)
        return True

    def remove(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Take out and return the requests that match: they are aborted."""
        moves = [move for move in self._moves.values() if matches(move.req)]
        for move in moves:
            if move.leaves:
                self._discard(move)
            else:
                self._end(move, 0)
        return [move.req for move in moves]

    def step(self, running_batch: ScheduleBatch) -> None:
        """Go on with the moves, before anything is admitted beside ``running_batch``."""
        if self._asked:
            self._take_out(running_batch)
        for move, tokens in self._ended() if self._moves else ():
            self._end(move, tokens)
            if move.leaves:
                self._forget(move.req)
                send_abort(self._scheduler, move.req, moved_reason(max(tokens, 0)))
            else:
                self._admission.enqueue(move.req)

    def _ended(self) -> list[tuple[_Move, int]]:
        """Return the moves that are over, and how many tokens each has moved."""
        files, moves = self._files, list(self._moves.values())
        assert files is not None
        for move in moves:
            if move.slots is None:
                move.slots = self._cache.saved_slots(move.req)
                if move.slots is not None:
                    move.job = files.begin_write(move.req, move.slots, move.model)
        tokens = list(map(self._moved_tokens, moves))
        if files.num_ranks > 1:
            tokens = self._cache.least_of_ranks(tokens)
        return [each for each in zip(moves, tokens, strict=True) if each[1] != _PENDING]

    def _moved_tokens(self, move: _Move) -> int:
        if move.slots is not None:
            if move.job is None:
                return 0
            if move.job.has_succeeded is not None:
                return len(move.slots) if move.job.has_succeeded else 0
        is_late = time.monotonic() - move.since_s > self.timeout_s
        return _GIVEN_UP if is_late else _PENDING

    def _end(self, move: _Move, tokens: int) -> None:
        has_kv = tokens > 0
        if move.leaves and not has_kv:
            self._discard(move)
        else:
            del self._moves[move.req.rid]
        if not move.leaves:
            assert move.job is not None
            move.job.give_up()
            self._cache.arrived(move.req, has_kv=has_kv)
        moved = "moved_out_tokens" if move.leaves else "moved_in_tokens"
        self._counts[moved] += max(tokens, 0)
        self._counts["moves_without_kv"] += not has_kv

    def _discard(self, move: _Move) -> None:
        """Remove what is left of a request, which nobody will take."""
        del self._moves[move.req.rid]
        if move.job is not None:
            assert self._files is not None
            move.job.give_up()
            self._files.remove(move.req.rid)

    def yield_to_threads(self) -> None:
        """Sleep when nothing runs: Python's lock would mostly be this thread's otherwise."""
        if len(self):
            time.sleep(_YIELD_S)

    def _take_out(self, running_batch: ScheduleBatch) -> None:
        """Retract the requests that were asked for, and take them out of the queue."""
        asked = self._asked = {
            rid: model for rid, model in self._asked.items() if self._can_leave(rid)
        }
        if not asked:
            return
        if any(req.rid in asked for req in self._view.suspended):
            self._admission.give_up()
        drop_ended(running_batch)  # A finished request has nothing left to release.
        self._retraction.retract(asked.keys(), running_batch)
        gone = self._admission.remove(lambda req: req.rid in asked)
        for req in (*gone, *(req for rid in asked for req in self._view.remove_waiting(rid))):
            self._admission.forget(req.rid, Ending.ABORTED)
            self._cache.copy_to_host(req)
            self._moves[req.rid] = _Move(req, True, asked.pop(req.rid), time.monotonic())
