"""What a scheduler asks of the part that admits requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from sglang_coserve.core.control.interference import Interference
from sglang_coserve.core.latency_model import LatencyModel
from sglang_coserve.core.request import Ending
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.srt.steps.batch_results import BatchResults
from sglang_coserve.srt.steps.offline_retraction import Prefill
from sglang_coserve.srt.steps.step_runner import StepTerms

__all__ = ["OFFLINE_EVENTS", "Admission"]

Req = Any
ScheduleBatch = Any

OFFLINE_EVENTS: Final = (
    "received",
    "admitted",
    "parked",
    "retracted",
    "put_back",
    "aborted_waiting",
)
"""Counts of offline requests."""


class Admission(Protocol):
    """Keeps the waiting offline requests, and decides what each scheduling pass admits."""

    budget_s: float | None
    """What offline work was packed under in the last plan that bounded it; infinite before one.
    None if there are no plans."""

    event_names: tuple[str, ...]
    """Counts of what happened to offline requests, for status and metrics."""

    # --- Who waits -----------------------------------------------------------------------

    def enqueue(self, req: Req) -> None:
        """Let an offline request wait; ``retraction_count`` is above 0 if it ran before.

        One that ran must not be admitted again in the same pass: under overlap
        scheduling it would take the result of its last step, still queued, for its own.
        """
        ...

    def arrived(self, req: Req, info: RequestInfo) -> None:
        """Record an online request that waits in SGLang's queue."""
        ...

    def remove(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Take out and return the offline requests that match and are in no batch of SGLang's.

        O(waiting).
        """
        ...

    def num_waiting(self) -> int:
        """Count the offline requests that are in no batch of SGLang's."""
        ...

    def take_launched(self) -> list[Req]:
        """Take out the decodes of the last pass that are not in SGLang's running batch."""
        ...

    def num_running(self) -> int:
        """Count the offline requests that run, and are not in SGLang's running batch."""
        ...

    def kept(self) -> Iterable[Req]:
        """Return the requests that are kept here alone: those that wait, and those that have ended
        and are yet to be forgotten. O(waiting)."""
        ...

    def forget(self, rid: str, ending: Ending) -> None:
        """Drop what is kept of a request that has ended, if anything is."""
        ...

    # --- One pass ------------------------------------------------------------------------

    def admit(self, running_batch: ScheduleBatch, prefill: Prefill) -> Any:
        """Return SGLang's plan of what to prefill beside ``running_batch``.

        ``prefill`` is SGLang's own admission of what is in its queue.
        """
        ...

    def settle(self, last_batch: Any) -> Any:
        """Return what SGLang is to merge into its running batch when a pass begins: its last batch,
        or None if that was one of the offline lane."""
        ...

    def stopped(self) -> None:
        """Note that the batch that was launched first has no result."""
        ...

    def give_up(self) -> None:
        """Drop the suspended step."""
        ...

    def launched(self, batch: ScheduleBatch | None) -> None:
        """Note the batch with which a pass ends; None if nothing is to run."""
        ...

    @property
    def terms(self) -> StepTerms | None:
        """When the batch of this pass may stop early; None if it runs to its end."""
        ...

    def processed(self, results: BatchResults) -> None:
        """Note the results of the batch that was launched first."""
        ...

    # --- What others ask about -----------------------------------------------------------

    @property
    def interference(self) -> Interference:
        """What online requests got, and what they would have got alone if that is known."""
        ...

    def latency_model(self) -> LatencyModel | None:
        """Return what predicts steps now; None if nothing does."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what the status says of this kind of admission, in plain values."""
        ...
