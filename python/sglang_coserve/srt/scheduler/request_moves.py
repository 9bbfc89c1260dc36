"""Requests that leave for another engine, and those that come from one, with their KV.

Of the online ones, these are prompts that a relaxed engine computes for a strict one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from sglang_coserve.core.request import Ending
from sglang_coserve.lines.background import TaskSupervisor
from sglang_coserve.srt.admission.admission import Admission
from sglang_coserve.srt.compat import send_abort
from sglang_coserve.srt.kv_checkpoint.kv_moves import KvLocation, KvMoves
from sglang_coserve.srt.marks.offline_marks import leaves_with, take_moved_kv
from sglang_coserve.srt.marks.request_marks import is_offline
from sglang_coserve.srt.monitoring.scheduler_query import moved_reason
from sglang_coserve.srt.steps.engine_parts import EngineParts

_YIELD_S: Final = 0.001
"""Short against a step, and against what a file takes."""

Req = Any
ScheduleBatch = Any


class RequestMoves:
    """Where requests are that neither run nor wait, as their KV is on its way.

    One that leaves is retracted first, as for an online request: its KV goes to the tree and to
    the host. One that comes finds its KV there as if it had been retracted here.
    """

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
        self._checkpointing = parts.checkpointing
        self._ledger = parts.ledger
        self._forget = forget
        self._kv: KvMoves | None = None
        """None: no KV is moved."""

        if parts.config.kv_move_dir is not None:
            directory = Path(parts.config.kv_move_dir)
            self._kv = KvMoves(parts.scheduler.tree_cache, directory, background)
        self._asked: dict[str, str] = {}
        """The requests that are to leave, with the model that their KV is of."""

        self._loading: list[Req] = []
        """Online requests whose KV is here, and goes to the device before they wait."""

    def __len__(self) -> int:
        return 0 if self._kv is None else len(self._kv) + len(self._loading)

    def kept(self) -> Iterable[Req]:
        """Return the requests whose KV is on its way."""
        return () if self._kv is None else (*self._kv.reqs(), *self._loading)

    def ask(self, rids: Sequence[str], model: str) -> list[str]:
        """Let requests leave, with the KV of ``model``; return those that do.

        The KV of each is left under its rid.
        """
        known = [] if self._kv is None else [rid for rid in rids if self._leaving(rid) is not None]
        self._asked |= dict.fromkeys(known, model)
        return known

    def _leaving(self, rid: str) -> Req | None:
        """Return a request that can leave; None if it has ended, or is about to."""
        live = self._ledger.get(rid)
        if live is None or live.req.finished() or live.req.to_finish is not None:
            return None
        return live.req

    def come(self, req: Req) -> bool:
        """Begin to fetch the KV that was left for a new request; False if there is none to wait
        for. Note it if the request is to leave after its prompt."""
        moved = take_moved_kv(req)
        if self._kv is None:
            return False
        if (model := leaves_with(req)) is not None:
            self._asked[req.rid] = model
        if moved is None:
            return False
        return self._kv.come(req, KvLocation(*moved))

    def remove(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Take out and return the requests that match: they are aborted."""
        if self._kv is None:
            return []
        gone = [req for req in self._loading if matches(req)]
        self._loading = [req for req in self._loading if not matches(req)]
        return self._kv.remove(matches) + gone

    def step(self, running_batch: ScheduleBatch) -> None:
        """Go on with the moves, before anything is admitted beside ``running_batch``."""
        if self._kv is None:
            return
        if self._asked:
            self._take_out(running_batch)
        left, came = self._kv.step()
        for each in left:
            self._forget(each.req)
            send_abort(self._scheduler, each.req, moved_reason(each.tokens))
        for req in came:
            if is_offline(req):
                self._admission.enqueue(req)
            else:
                self._loading.append(req)
        if self._loading:
            self._enqueue_loaded()

    def _enqueue_loaded(self) -> None:
        """Let the online requests wait whose KV is on the device, or does not come there."""
        # Without plans SGLang loads it with the batch.
        is_planned = self._admission.core is not None
        held = self._checkpointing.hold_back(self._loading) if is_planned else ()
        loaded = [req for req in self._loading if req.rid not in held]
        self._loading = [req for req in self._loading if req.rid in held]
        for req in loaded:
            self._scheduler._add_request_to_queue(req)

    def yield_to_threads(self) -> None:
        """Sleep when nothing runs: Python's lock would mostly be this thread's otherwise."""
        if len(self):
            time.sleep(_YIELD_S)

    def _take_out(self, running_batch: ScheduleBatch) -> None:
        """Retract the requests that were asked for, and take them out of the queue.

        An online one goes once its prompt is computed.
        """
        assert self._kv is not None
        reqs = [req for rid in self._asked if (req := self._leaving(rid)) is not None]
        self._asked = {req.rid: self._asked[req.rid] for req in reqs}
        asked = dict.fromkeys(req.rid for req in reqs if is_offline(req) or req.output_ids)
        if not asked:
            return
        if any(req.rid in asked for req in self._view.suspended):
            self._admission.give_up()
        running_batch.filter_batch()  # A finished request has nothing left to release.
        self._retraction.retract(asked.keys(), running_batch)
        gone = self._admission.remove(lambda req: req.rid in asked)
        for req in (*gone, *(req for rid in asked for req in self._view.remove_waiting(rid))):
            self._admission.forget(req.rid, Ending.ABORTED)
            self._kv.leave(req, self._asked.pop(req.rid))
