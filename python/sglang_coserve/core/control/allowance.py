"""How long offline work may delay online requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from sglang_coserve.core.control.latency_account import LatencyAccount, LatencyPair
from sglang_coserve.core.control.slo import Latency, Slo, Statistic
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.metrics import SloTargets

__all__ = ["Allowance"]

_NO_SLO: Final = Slo(Latency.TTFT, Statistic.P99, limit_s=math.inf)
"""Only the targets that requests bring along count."""


class Allowance:
    """Limits the time that offline work adds to steps, by an account of each SLO.

    The deadlines of running requests already bound each step (``online_phase``). They cannot
    account for requests that arrive during the step, nor for prompts that stall the decodes after
    it. For these, what offline work may *add* is bounded: ``arrival_s`` and ``gap_s``.
    """

    def __init__(self, slos: Sequence[Slo], *, ttft_prior_s: float, gap_prior_s: float) -> None:
        """Start without requests.

        Args:
            slos: Absolute limits, and tolerances relative to the no-interference baseline.
            ttft_prior_s: Baseline TTFT assumed until one is known.
            gap_prior_s: Baseline gap assumed until one is known.
        """

        def accounts(latency: Latency, prior_s: float) -> list[LatencyAccount]:
            return [LatencyAccount(slo, prior_s) for slo in slos if slo.latency is latency]

        self._ttft = accounts(Latency.TTFT, ttft_prior_s) or [LatencyAccount(_NO_SLO, ttft_prior_s)]
        self._tpot = accounts(Latency.TPOT, gap_prior_s)
        self._tbt = accounts(Latency.TBT, gap_prior_s)
        self.needs_gaps: Final = bool(self._tbt)
        """True when an SLO bounds gaps, so that ``gaps`` must be called."""

        self.is_relative: Final = all(slo.limit_s is None for slo in slos)
        """True when no SLO asks for other latencies than those without offline work."""

    @property
    def arrival_s(self) -> float:
        """Longest time, in seconds, that offline work may add to the TTFT of a request that
        arrives now."""
        # It waits for the rest of a step, and is served in another one as long.
        return min([account.added_s(account.target_s / 2) for account in self._ttft])

    @property
    def prompt_s(self) -> float:
        """Longest time, in seconds, that may be added to the TTFT of every request."""
        return min([account.surely_s for account in self._ttft])

    @property
    def prompt_share(self) -> float:
        """The share of the time until a first token is due that online work alone may take: less
        than 1 with a debt."""
        return min([account.share for account in self._ttft])

    def gap_s(self, slack_s: float) -> float:
        """Return the longest time, in seconds, that offline work may add to a step whose online
        decodes could wait ``slack_s`` longer."""
        slack_s = max(slack_s, 0.0)
        return min([one.added_s(slack_s) for one in self._tpot + self._tbt], default=slack_s)

    @property
    def gap_share(self) -> float:
        """The share of the TPOT target that offline work may take of a step: 1 without one."""
        target_s = self.targets.tpot_s
        return 1.0 if target_s is None else self.gap_s(target_s) / target_s

    @property
    def targets(self) -> SloTargets:
        """TTFT and TPOT targets of a request that brought none of its own."""
        ttft_s = min([account.target_s for account in self._ttft])
        tpot_s = min((account.target_s for account in self._tpot + self._tbt), default=None)
        return SloTargets(None if math.isinf(ttft_s) else ttft_s, tpot_s)

    def first_token(
        self, info: RequestInfo, ttft_s: float, alone_s: float | None, now_s: float
    ) -> None:
        """Record a TTFT, and the baseline's TTFT of the same request (None if unknown)."""
        values = {LatencyPair(info.ttft_target_s, ttft_s, alone_s): 1}
        for account in self._ttft:
            account.observe(values, now_s)

    def gaps(self, gaps: Iterable[tuple[RequestInfo, float, float | None]], now_s: float) -> None:
        """Record gaps that became known together: request, measured, in the baseline.

        In seconds; the baseline's gap is None if unknown. O(gaps).
        """
        # Gaps that end with the same step are mostly equal.
        values = Counter(
            [LatencyPair(info.tpot_target_s, gap_s, alone_s) for info, gap_s, alone_s in gaps]
        )
        for account in self._tbt:
            account.observe(values, now_s)

    def finished(
        self, info: RequestInfo, tpot_s: float, alone_s: float | None, now_s: float
    ) -> None:
        """Record the TPOT of a request that has ended, and its TPOT in the baseline."""
        for account in self._tpot:
            account.observe({LatencyPair(info.tpot_target_s, tpot_s, alone_s): 1}, now_s)
