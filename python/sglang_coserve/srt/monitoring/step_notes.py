"""What passes in the scheduler, noted in a few microseconds and taken in many steps at a time.

Right after a forward pass the processor's caches hold something else: looking at the requests of a
step then takes 41 µs of CPU time, and 18 µs, the note among them, where 32 steps are looked at
together (32 requests on an AMD EPYC; tag ``measurements-1``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.srt.forward_kind import ForwardKind, prefilled
from sglang_coserve.srt.steps.offline_lane import OfflineLane
from sglang_coserve.srt.steps.request_ledger import RequestLedger

__all__ = ["Begun", "Ended", "Forgotten", "Launched", "Note"]

Req = Any
ScheduleBatch = Any


class Begun(NamedTuple):
    """A request in its first batch."""

    info: RequestInfo
    cached_tokens: int
    """Tokens of its prompt that the prefix cache had."""


class Launched(NamedTuple):
    """A batch is about to run."""

    at_s: float
    first_layer: int
    """0 unless it goes on after a suspension."""

    begun: Sequence[Begun]

    @classmethod
    def of(
        cls, batch: ScheduleBatch, now_s: float, lane: OfflineLane | None, ledger: RequestLedger
    ) -> Launched:
        """Return the note of a batch; to be called before the ledger's ``launched``.

        O(its prompts).

        Args:
            batch: It.
            now_s: The time.
            lane: May have a suspended batch that goes on.
            ledger: Knows the live requests.
        """
        held = None if lane is None else lane.suspended
        first_layer = held.layer if held is not None and held.batch is batch else 0
        begun: list[Begun] = []
        if batch.forward_mode.is_extend():
            # Requests that decode beside prompts have begun.
            for req, cached_tokens in zip(prefilled(batch), batch.prefix_lens, strict=False):
                rid = req.rid
                if rid in ledger and not ledger.has_begun(rid):
                    begun.append(Begun(ledger[rid], cached_tokens))
        return cls(now_s, first_layer, begun)


class Ended(NamedTuple):
    """The batch that was launched first has its results, or was suspended."""

    at_s: float
    reqs: Sequence[Req]
    kind: ForwardKind | None
    """What they did."""

    has_token: Sequence[bool] = ()
    """Which requests got a token; none where it was suspended."""

    stopped_at: int | None = None
    """The first layer that has not run; None: it ended."""


class Forgotten(NamedTuple):
    """A request has ended."""

    at_s: float
    rid: str


Note: TypeAlias = Launched | Ended | Forgotten
