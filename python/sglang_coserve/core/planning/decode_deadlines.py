"""When the online decodes of a step are due."""

from __future__ import annotations

import math

from sglang_coserve.core.planning.step_requests import StepRequests

__all__ = ["DecodeDeadlines"]


class DecodeDeadlines:
    """Tells how long a step may take before online decodes miss their TPOT targets."""

    def __init__(self, requests: StepRequests, tpot_s: float | None) -> None:
        """Look up when each decode is due. O(requests).

        Args:
            requests: The requests of the engine.
            tpot_s: Target of requests without their own.
        """
        self._now_s = requests.snapshot.now_s
        self._decodes = requests.online_decodes
        due_s = [
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
        self.slack_s = min(min(due_s, default=math.inf) - self._now_s, self.elsewhere_s)
        """Time until the first online decode misses its TPOT target. A decode in another
        micro-batch is assumed to have got its last token just now."""

    def least_tpot_s(self, default_s: float) -> float:
        """Return the strictest TPOT target of the online decodes, in seconds. O(requests).

        ``default_s`` is the target of requests without their own, and the result if no online
        request decodes.
        """
        targets_s = [request.info.tpot_target_s or default_s for request in self._decodes]
        return min(min(targets_s, default=default_s), self.elsewhere_s)
