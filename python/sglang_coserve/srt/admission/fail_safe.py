"""Keeps an error of the core from ending the engine: offline work waits for a pass, or for good."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from sglang_coserve.core.advisory import Advisory
from sglang_coserve.core.offline_queue import OfflineQueue, QueuedRequest
from sglang_coserve.core.scheduler import Scheduler as Core
from sglang_coserve.core.step import StepResult
from sglang_coserve.srt.admission.online_only import AFTER_FAILURE, OnlineOnly

OFFLINE_WORK: Final = "offline work"
"""Name, among the parts that are off, of all offline work."""

_MOST_IN_A_ROW: Final = 8
"""Failed plans without a good one in between after which offline work stops. An accident does not
repeat as often in a row."""

logger = logging.getLogger(__name__)


class StoppedCore(Core):
    """Takes the place of a core that has lost track of the engine: it judges online requests as
    before, and has no offline ones. It is not asked for plans."""

    def __init__(self, core: Core) -> None:
        """Be ``core`` in all but its offline requests, which are forgotten."""
        self.__dict__ = core.__dict__
        self.queue = OfflineQueue(self._policy.queue_config(self._config.seed))

    def add_offline(self, request: QueuedRequest) -> None:
        """Do nothing: the request waits until the next start."""

    def restore(self, rid: str, generated_tokens: int) -> None:
        """Do nothing: the request waits until the next start."""

    def update(self, result: StepResult) -> None:
        """Learn from a result as if the step had no plan: the plan may be what is wrong."""
        result = replace(result, step=None)
        self._advisory.tell("judgement", super().update, result)


class FailSafe:
    """Answers for the core where it fails, and stops offline work when it cannot be trusted."""

    def __init__(self, advisory: Advisory, stop: Callable[[], None]) -> None:
        """``advisory`` reports that offline work has stopped; ``stop`` is called once, then."""
        self._advisory = advisory
        advisory.without(OFFLINE_WORK, stop)
        self._in_a_row = 0
        self.num_failed = 0
        """Plans that failed since the start."""

    @property
    def stopped_by(self) -> str | None:
        """The error for which offline requests wait until the next start of the engine; None while
        they are served."""
        return self._advisory.off.get(OFFLINE_WORK)

    def planned(self) -> None:
        """Note a plan that was carried out."""
        self._in_a_row = 0

    def online_only(self, error: Exception) -> OnlineOnly:
        """Return what is done in place of a plan that failed; too many in a row stop offline
        work."""
        self.num_failed += 1
        self._in_a_row += 1
        logger.error("no plan for this pass: SGLang's own serves it", exc_info=error)
        if self._in_a_row >= _MOST_IN_A_ROW:
            self._stop(error)
        return AFTER_FAILURE

    def tell(self, call: Callable[..., None], *args: object) -> None:
        """Tell the core what became of a request or a step.

        A core that fails here has lost track of the engine, so offline work stops.
        """
        try:
            call(*args)
        except Exception as error:
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        self._advisory.switch_off(OFFLINE_WORK, error)
