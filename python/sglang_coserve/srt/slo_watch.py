"""Tells the SLO monitor what the engine's online requests experienced."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.slo_monitor import SloMonitor
from sglang_coserve.core.snapshot import RequestInfo

__all__ = ["SloWatch"]

logger = logging.getLogger(__name__)

Req = Any


@dataclass(slots=True)
class _Live:
    """A request that has not ended."""

    info: RequestInfo
    first_token_s: float | None = None
    last_token_s: float = 0.0


class SloWatch:
    """Online requests from arrival to end. Times are this process's, measured, not planned."""

    def __init__(self, config: CoserveConfig, *, warns: bool) -> None:
        """``warns`` is for one of the ranks, which all see the same."""
        self._warns = warns
        self._monitor = SloMonitor(config.slo_targets(), config.slos())
        self._live: dict[str, _Live] = {}

    def arrived(self, info: RequestInfo) -> None:
        """Watch an online request from now on."""
        if info.is_online:
            self._live.setdefault(info.rid, _Live(info))

    def offline_ran(self, start_s: float, end_s: float, online_part_s: float) -> None:
        """Note an iteration with offline rows, before its results."""
        if end_s > start_s:
            self._monitor.offline_ran(start_s, end_s, online_part_s)

    def results(self, reqs: Iterable[Req], now_s: float) -> None:
        """Note that an iteration's tokens are out. O(online rows)."""
        monitor = self._monitor
        for req in reqs:
            live = self._live.get(req.rid)
            if live is None or not req.output_ids:
                continue
            if live.first_token_s is None:
                live.first_token_s = now_s
            elif monitor.needs_gaps:
                monitor.gap(live.info, live.last_token_s, now_s)
            live.last_token_s = now_s
            if req.finished():
                del self._live[req.rid]
                # One that the client aborted says nothing about the server.
                if req.finished_reason.to_json()["type"] != "abort":
                    tokens = len(req.output_ids)
                    monitor.finished(live.info, live.first_token_s, now_s, tokens)
        warning = monitor.warning(now_s)
        if warning is not None and self._warns:
            logger.warning("%s", warning)

    def refused(self, rid: str, now_s: float) -> None:
        """Note that the server itself gave a request up."""
        live = self._live.pop(rid, None)
        if live is not None:
            self._monitor.failed(live.info, now_s)

    def forget(self, rid: str) -> None:
        """Stop watching a request; one that has ended is forgotten already."""
        self._live.pop(rid, None)

    def report(self, now_s: float) -> dict[str, Any]:
        """Return the standing of every SLO, in plain values."""
        return self._monitor.report(now_s).to_dict()
