"""Keeps an error of the core from ending the engine: offline work waits for a pass, or for good."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from sglang_coserve.core.advisory import Advisory

OFFLINE_WORK: Final = "offline work"
"""Name, among the parts that are off, of all offline work."""

_MOST_IN_A_ROW: Final = 8
"""Failed plans without a good one in between after which offline work stops. An accident does not
repeat as often in a row."""

logger = logging.getLogger(__name__)


class FailSafe:
    """Counts the plans that failed, and stops offline work when no plan can be trusted any more."""

    def __init__(self, advisory: Advisory) -> None:
        """``advisory`` reports that offline work has stopped."""
        self._advisory = advisory
        self._in_a_row = 0
        self.num_failed = 0
        """Plans that failed since the start."""

        self.is_stopped = False
        """True when offline requests wait until the next start of the engine."""

    @property
    def stopped_by(self) -> str | None:
        """The error that stopped offline work; None while offline requests are served."""
        return self._advisory.off.get(OFFLINE_WORK)

    def planned(self) -> None:
        """Note a plan that was carried out."""
        self._in_a_row = 0

    def failed(self, error: Exception) -> None:
        """Note a plan that failed; too many in a row stop offline work."""
        self.num_failed += 1
        self._in_a_row += 1
        logger.error("no plan for this pass: SGLang's own serves it", exc_info=error)
        if self._in_a_row >= _MOST_IN_A_ROW:
            self._stop(error)

    def tell(self, call: Callable[..., None], *args: object) -> None:
        """Tell the core what became of a request or a step.

        A core that fails here has lost track of the engine, so offline work stops. A core that
        failed before is not called.
        """
        if self.is_stopped:
            return
        try:
            call(*args)
        except Exception as error:
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        self.is_stopped = True
        self._advisory.switch_off(OFFLINE_WORK, error)
