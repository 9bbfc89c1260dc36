"""Moves offline requests with their KV from one engine to another.

The engine that gives a request back writes the request's saved pages to a file, and then says that
the request has gone. The engine that takes the request reads the file into host memory, as if it
had retracted the request itself. No step waits for a move: KV that is not there in time, or not on
every rank, is computed again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from sglang_coserve.core.migration import preferred_length, step_bound_s
from sglang_coserve.core.request import Ending, RequestClass
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.http_lines.engine_load import WantedLines
from sglang_coserve.srt.admission.admission import Admission
from sglang_coserve.srt.compat import computed_tokens, drop_ended, send_abort
from sglang_coserve.srt.kv_moves.kv_directory import is_kv_name
from sglang_coserve.srt.kv_moves.kv_files import KvFiles, KvJob
from sglang_coserve.srt.marks.offline_marks import take_moved_kv
from sglang_coserve.srt.monitoring.scheduler_query import moved_reason
from sglang_coserve.srt.request_moves import COUNTED, RequestMoves
from sglang_coserve.srt.steps.engine_parts import EngineParts

_YIELD_S: Final = 0.001
"""Short against a step, and against what a file takes."""

_PENDING: Final = -1
_GIVEN_UP: Final = -2
"""What a rank says of a move; otherwise the tokens that it has moved. The least counts."""

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


class FileMoves(RequestMoves):
    """Keeps the requests whose KV is on its way through files.

    A request that leaves is retracted first, as for an online request: its KV goes to the tree and
    to the host. A request that comes finds its KV there as if it had been retracted here.
    """

    timeout_s = 10.0
    """Longest that a request waits for its KV, on each of the two engines. It is more than a disk
    takes for some GB; what a hanging one delays is computed again."""

    def __init__(
        self,
        parts: EngineParts,
        admission: Admission,
        files: KvFiles,
        forget: Callable[[Req], None],
    ) -> None:
        """``forget`` is called with requests that have left."""
        self.pool = parts.config.pool
        self._scheduler = parts.scheduler
        self._admission = admission
        self._queues = parts.queues
        self._retraction = parts.retraction
        self._requests = parts.requests
        self._forget = forget
        self._cache = parts.scheduler.tree_cache
        self._files = files
        self._asked: dict[str, str] = {}
        """The requests that are to leave, with the model that their KV is of."""

        self._moves: dict[str, _Move] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._moves)

    def figures(self) -> Mapping[str, int]:
        """See ``RequestMoves.figures``."""
        return {name: self._counts[name] for name in COUNTED}

    def wants(
        self,
        online: Sequence[Req],
        offline: Sequence[Req],
        *,
        free_kv_tokens: int,
        free_requests: int,
    ) -> WantedLines | None:
        """See ``RequestMoves.wants``: of a strict engine, while no line waits here, and there is
        time for more."""
        if self.pool != "strict":
            return None
        core = self._admission.core
        tpot_s = core.interference.allowance.targets.token_s
        online_batch = StepStats.of(decodes=map(computed_tokens, online))
        preference = preferred_length(
            core.model,
            StepStats.of(decodes=map(computed_tokens, (*online, *offline))),
            step_bound_s(core.model, online_batch, tpot_s),
            free_kv_tokens,
            includes_all=len(self._requests.of_class(RequestClass.OFFLINE)) == len(offline),
        )
        if preference is None or free_requests < 1:
            return None
        tokens, max_tokens = preference
        return WantedLines(tokens=tokens, max_tokens=max_tokens, lines=free_requests)

    def kept(self) -> Iterable[Req]:
        """See ``RequestMoves.kept``."""
        return [move.req for move in self._moves.values()]

    def ask(self, rids: Sequence[str], model: str) -> list[str]:
        """See ``RequestMoves.ask``."""
        known = [rid for rid in rids if self._can_leave(rid)]
        self._asked |= dict.fromkeys(known, model)
        return known

    def _can_leave(self, rid: str) -> bool:
        """Return whether a request is here, and neither has ended nor is about to."""
        live = self._requests.get(rid)
        return live is not None and not live.req.finished() and live.req.to_finish is None

    def come(self, req: Req) -> bool:
        """See ``RequestMoves.come``."""
        moved = take_moved_kv(req)
        if moved is None:
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
        """See ``RequestMoves.remove``."""
        moves = [move for move in self._moves.values() if matches(move.req)]
        for move in moves:
            if move.leaves:
                self._discard(move)
            else:
                self._end(move, 0)
        return [move.req for move in moves]

    def step(self, running_batch: ScheduleBatch) -> None:
        """See ``RequestMoves.step``."""
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
            move.job.give_up()
            self._files.remove(move.req.rid)

    def yield_to_threads(self) -> None:
        """See ``RequestMoves.yield_to_threads``: Python's lock would mostly be this thread's
        otherwise."""
        if len(self):
            time.sleep(_YIELD_S)

    def _take_out(self, running_batch: ScheduleBatch) -> None:
        """Retract the requests that were asked for, and take them out of the queue."""
        asked = self._asked = {
            rid: model for rid, model in self._asked.items() if self._can_leave(rid)
        }
        if not asked:
            return
        if any(req.rid in asked for req in self._queues.suspended):
            self._admission.give_up()
        drop_ended(running_batch)  # A finished request has nothing left to release.
        self._retraction.retract(asked.keys(), running_batch)
        gone = self._admission.remove(lambda req: req.rid in asked)
        for req in (*gone, *(req for rid in asked for req in self._queues.remove_waiting(rid))):
            self._admission.forget(req.rid, Ending.ABORTED)
            self._cache.copy_to_host(req)
            self._moves[req.rid] = _Move(req, True, asked.pop(req.rid), time.monotonic())
