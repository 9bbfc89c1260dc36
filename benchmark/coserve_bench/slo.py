"""What online requests are promised, derived from how they fare without offline load."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sglang_coserve.metrics import RequestTimeline, SloTargets, latency_report

__all__ = ["SloRule", "targets_of"]


@dataclass(frozen=True, slots=True)
class SloRule:
    """How targets follow from the online-only runs at the same load."""

    kind: Literal["p99", "mean-tpot", "fixed"]
    """``p99``: their P99 TTFT and P99 ITL, times ``scale`` (ConServe §6.3).
    ``mean-tpot``: their mean TPOT times ``scale``, no TTFT target (HyGen §5.1).
    ``fixed``: ``targets`` whatever they are."""

    scale: float = 1.0
    targets: SloTargets | None = None

    @property
    def name(self) -> str:
        """A short name for tables and files: ``p99x1.2``."""
        return "fixed" if self.kind == "fixed" else f"{self.kind}x{self.scale:g}"


def targets_of(rule: SloRule, baseline: Sequence[Sequence[RequestTimeline]]) -> SloTargets | None:
    """Return the targets; None where there is no baseline run to derive them from.

    Each figure is the median over the runs in ``baseline``.
    """
    if rule.kind == "fixed":
        return rule.targets
    reports = [latency_report(timelines) for timelines in baseline]
    if rule.kind == "mean-tpot":
        return _scaled(rule.scale, ttft_s=[], tpot_s=[report.tpot.mean_s for report in reports])
    return _scaled(
        rule.scale,
        ttft_s=[report.ttft.p99_s for report in reports],
        tpot_s=[report.itl.p99_s for report in reports],
    )


def _scaled(
    scale: float, *, ttft_s: Sequence[float | None], tpot_s: Sequence[float | None]
) -> SloTargets | None:
    targets = SloTargets(_median_times(scale, ttft_s), _median_times(scale, tpot_s))
    return None if targets == SloTargets() else targets


def _median_times(scale: float, values_s: Sequence[float | None]) -> float | None:
    defined = [value for value in values_s if value is not None]
    return scale * statistics.median(defined) if defined else None
