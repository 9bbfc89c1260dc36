"""Policies that break a rule of the other policies on purpose.

A policy in ``POLICIES`` is in every test of all policies. A policy that fails one on purpose is
named here, or at the test if no other test needs the rule.
"""

from __future__ import annotations

from collections.abc import Set

from sglang_coserve.core.policies import POLICIES
from sglang_coserve.simulator.run import BASELINES

HOLDS_ONLINE_BACK = {"fcfs", "non_preemptive", "bros"}
"""Offline work may run while an online decode is paused, an online prompt is cut, or an online
request waits for KV or a slot that offline requests hold."""

KEEPS_OFFLINE_KV = {"fcfs", "non_preemptive"}
"""No offline request is retracted for an online prompt, which waits until they end."""

IGNORES_CLASSES = {"fcfs"}
"""Requests of both classes are one queue. An online request may be retracted for an offline one."""

RUNS_NO_OFFLINE = {"online_only"}
"""Offline requests wait forever."""

RUNS_ALL_DECODES = {"fcfs", "non_preemptive", "priority", "sarathi"}
"""Every offline decode runs, however long it makes the step."""

SHEDS_NOBODY = {"fcfs", "bros"}
"""No request is refused under overload."""

HAS_FIXED_BUDGET = {"hygen"}
"""A budget bounds every step: without online requests, and whatever requests ask for."""

SERVES_BY_URGENCY = {"bros"}
"""Online requests run by the time that is left to them. A lost deadline bounds nothing, and the
most urgent prompt may exceed the bound of the step."""


def all_but(exceptions: Set[str]) -> list[str]:
    """Return the names of all policies but these, in the order of ``POLICIES``."""
    return [name for name in POLICIES if name not in exceptions]


LATENCY_POLICIES = all_but(BASELINES)
"""Policies that plan by latencies, so that targets bound their steps."""
