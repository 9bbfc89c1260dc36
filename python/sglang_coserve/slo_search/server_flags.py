"""The flags with which a server schedules as the search has assumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sglang_coserve.core.control.slo import SloCheck, format_slo

__all__ = ["budget_flags", "policy_flags", "slo_flags"]


def policy_flags(policy: str, profile: Path) -> list[str]:
    """Return the flags that do not depend on the SLOs."""
    return ["--offline-policy", policy, "--latency-profile", str(profile)]


def slo_flags(check: SloCheck) -> list[str]:
    """Return the flags for the SLOs, with tolerances as absolute limits, to the microsecond."""
    limits_s = [max(round(slo.limit_over(check.online_only), 6), 1e-6) for slo in check.slos]
    absolute = (
        replace(slo, limit_s=limit_s, tolerance=None)
        for slo, limit_s in zip(check.slos, limits_s, strict=True)
    )
    return ["--slo", *map(format_slo, absolute)]


def budget_flags(budget_s: float) -> list[str]:
    """Return the flags for the step budget."""
    return ["--iteration-budget-ms", f"{budget_s * 1e3:.4g}"]
