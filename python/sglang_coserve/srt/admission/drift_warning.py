"""Warns operators when the latency model no longer fits the machine."""

from __future__ import annotations

import logging
from typing import Final

from sglang_coserve.core.learned_model import PredictionError

__all__ = ["DriftWarning"]

logger = logging.getLogger(__name__)

_INTERVAL_S: Final = 60.0


class DriftWarning:
    """Logs a warning while predictions are off, at most once a minute."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def check(self, error: PredictionError, now_s: float) -> None:
        """Log a warning if ``error`` has drifted, at most once a minute."""
        if not error.has_drifted or now_s < self._next_s:
            return
        self._next_s = now_s + _INTERVAL_S
        logger.warning(
            "predicted step times are off by %.0f%% on average (bias %+.0f%%): targets "
            "may be missed or time wasted; other work on this machine? profile again with "
            "coserve profile",
            100 * (error.mape or 0.0),
            100 * (error.bias or 0.0),
        )
