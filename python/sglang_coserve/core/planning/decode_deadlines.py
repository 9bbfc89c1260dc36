"""When the online decodes of a step are due."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from sglang_coserve.core.planning.step_requests import StepRequests
from sglang_coserve.core.snapshot import Request

__all__ = ["DecodeDeadlines"]


class DecodeDeadlines:
    """Tells how long a step may take before online decodes miss their TPOT targets."""

    def __init__(
        self,
        requests: StepRequests,
        tpot_s: float | None,
        mean_due_s: Callable[[Sequence[Request]], float],
    ) -> None:
        """Look up when each decode is due. O(requests).

        Args:
            requests: The requests of the engine.
            tpot_s: Target of requests without their own.
            mean_due_s: See ``StepBuilder``.
        """
        self._now_s = requests.snapshot.now_s
        self._decodes = requests.online_decodes
        self._mean_due_s = mean_due_s
        self._offline_slack_s: float | None = None
        self._due_s = [
            (self._now_s if last_s is None else last_s) + target_s
            for info, _, _, _, _, last_s in requests.online_decodes
            if (target_s := info.tpot_target_s or tpot_s) is not None
        ]
        self.elsewhere_s = math.inf
        if requests.snapshot.elsewhere:
            targets_s = [
                request.info.tpot_target_s or tpot_s
                for request in requests.snapshot.elsewhere
                if request.info.is_online
            ]
            self.elsewhere_s = min([s for s in targets_s if s is not None], default=math.inf)
        """The strictest TPOT target of the online requests in other micro-batches."""
        self.slack_s = min(min(self._due_s, default=math.inf) - self._now_s, self.elsewhere_s)
        """Time until the first online decode misses its TPOT target. A decode in another
        micro-batch is assumed to have got its last token just now."""

    @property
    def offline_slack_s(self) -> float:
        """Time until offline work would make the first online decode late: ``slack_s``, or less
        where earlier gaps have already used up a request's mean.

        O(online decodes) on the first access.
        """
        if self._offline_slack_s is None:
            self._offline_slack_s = self.slack_s
            if self._decodes:
                due_s = self._mean_due_s(self._decodes)
                self._offline_slack_s = min(self.slack_s, due_s - self._now_s)
        return self._offline_slack_s

    def least_tpot_s(self, default_s: float) -> float:
        """Return the strictest TPOT target of the online decodes, in seconds. O(requests).

        ``default_s`` is the target of requests without their own, and the result if no online
        request decodes.
        """
        targets_s = [request.info.tpot_target_s or default_s for request in self._decodes]
        return min(min(targets_s, default=default_s), self.elsewhere_s)

    def num_late(self, seconds: float) -> int:
        """Return how many online decodes miss their TPOT target if their next token comes in
        ``seconds``. O(requests)."""
        end_s = self._now_s + seconds
        return sum([due_s < end_s for due_s in self._due_s])
