"""Asks the schedulers to let lines leave with their KV."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from typing import Any, Protocol

from sglang_coserve.srt.monitoring.scheduler_query import LEAVE, ask

logger = logging.getLogger(__name__)


class LeavingLine(Protocol):
    """A line that runs, as its backend knows it."""

    is_leaving: bool
    request_id: str

    @property
    def kv_model(self) -> str:
        """Name of the model whose KV the line has."""


class LineDepartures:
    """Lives on the event loop of SGLang's tokenizer manager, ``inner``."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._asked: list[LeavingLine] = []
        self._asking: set[asyncio.Task[None]] = set()

    def ask(self, line: LeavingLine) -> None:
        """Let a line's request leave with its KV; one that cannot any more is aborted."""
        line.is_leaving = True
        self._asked.append(line)
        if len(self._asked) == 1:
            # Nobody awaits this short task. Its line is cancelled in time by the line's stream.
            task = asyncio.get_running_loop().create_task(self._ask())
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _ask(self) -> None:
        by_model = defaultdict[str, list[str]](list)
        for line in self._asked:
            by_model[line.kv_model].append(line.request_id)
        self._asked = []
        for model, rids in by_model.items():
            leaving: set[str] = set()
            try:
                for known in await ask(self._inner, LEAVE, rids, model):
                    leaving.update(known)
            except Exception:
                logger.exception("%d lines go on elsewhere without their KV", len(rids))
            for rid in rids:
                if rid not in leaving:
                    self._inner.abort_request(rid)
