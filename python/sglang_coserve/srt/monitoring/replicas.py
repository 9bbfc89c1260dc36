"""Keys and summary of the co-serving part of SGLang's internal scheduler state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sglang_coserve.errors import StartupError

__all__ = [
    "EXPECTED_RATE_KEY",
    "STATE_KEY",
    "replicas_info",
    "sum_of_delays_s",
]

STATE_KEY: Final = "coserve"
"""Key of our part in a scheduler's internal state; its presence shows that it is ours."""

EXPECTED_RATE_KEY: Final = "expected_offline_tokens_per_s"
"""Key, within it, of the expected throughput of offline requests on an idle engine."""


def sum_of_delays_s(of_replicas: Sequence[Mapping[str, float] | None]) -> dict[str, float] | None:
    """Return by how much each batch has delayed online requests, on all replicas together.

    None where that is not known: without a no-interference baseline.
    """
    delays_s: dict[str, float] = {}
    for of_replica in of_replicas:
        if of_replica is None:
            return None
        for batch_id, seconds in of_replica.items():
            delays_s[batch_id] = delays_s.get(batch_id, 0.0) + seconds
    return delays_s


def replicas_info(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the co-serving part of ``/server_info`` from the internal state of each replica.

    Raises:
        StartupError: a scheduler is not ``CoserveScheduler``.
    """
    problems = [
        f"scheduler {rank} is not CoserveScheduler (its state has no {STATE_KEY!r})"
        for rank, state in enumerate(states)
        if STATE_KEY not in state
    ]
    if problems:
        raise StartupError("co-serving is not in place: " + "; ".join(problems))
    ours = [state[STATE_KEY] for state in states]
    rates = [state[EXPECTED_RATE_KEY] for state in ours]
    return {
        "offline_policy": ours[0]["config"]["offline_policy"],
        EXPECTED_RATE_KEY: None if None in rates else sum(rates),
    }
