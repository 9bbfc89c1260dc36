"""What the core planned under overlap scheduling, and what it could know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_coserve.core.request import RequestState
from sglang_coserve.core.step import Lane


class Planned(NamedTuple):
    """A plan."""

    first_in_flight_s: float | None
    """How long ago the online request arrived whose first token is in flight; None without one."""

    has_prompts: bool
    """Online prompts wait, or are unfinished."""

    has_offline: bool
    """Offline work was planned."""

    skips_decodes: bool


def watch_plans(scheduler: Any, note: Callable[[Planned], None]) -> None:
    """Note each plan of an engine's core."""
    admission = scheduler.parts.admission
    ledger, plan = admission._ledger, admission.core.plan

    def watched(snapshot: Any, cache: Any) -> Any:
        decodes = [
            request
            for request in snapshot.admitted
            if request.info.is_online and request.state is RequestState.DECODING
        ]
        ages_s = [
            snapshot.now_s - request.info.arrival_s
            for request in decodes
            if ledger.get(request.info.rid).last_token_s is None
        ]
        found = plan(snapshot, cache)
        has_offline = (
            found.lane is Lane.OFFLINE
            or any(chunk.rid.startswith("offline") for chunk in found.prefills)
            or found.batch.decode_requests > len(decodes)
        )
        oldest_s = max(ages_s, default=None)
        has_prompts = bool(snapshot.waiting) or any(
            request.info.is_online and request.state is RequestState.PREFILLING
            for request in snapshot.admitted
        )
        note(Planned(oldest_s, has_prompts, has_offline, found.skips_decodes))
        return found

    admission.core.plan = watched
