"""What the schedulers of a server say of themselves in SGLang's internal state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sglang_coserve.errors import StartupError

__all__ = [
    "BATCH_DELAYS_KEY",
    "EXPECTED_RATE_KEY",
    "STATE_KEY",
    "batch_delays_s",
    "replicas_info",
    "shown_states",
]

STATE_KEY: Final = "coserve"
"""Where the internal state of a scheduler has ours, by which one knows that it is in place."""

EXPECTED_RATE_KEY: Final = "expected_offline_tokens_per_s"
"""And there, what offline requests alone would get of the engine."""

BATCH_DELAYS_KEY: Final = "batch_delays_s"
"""And there, by how many seconds each batch has delayed online requests; not for everybody."""


def shown_states(states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what ``/coserve/status`` says of each replica: nobody's batch is named."""
    return [
        {name: value for name, value in state[STATE_KEY].items() if name != BATCH_DELAYS_KEY}
        for state in states
    ]


def batch_delays_s(states: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Return by how much each batch has delayed online requests, on all replicas together.

    None where that is not known: without a no-interference baseline.
    """
    of_replicas = [state[STATE_KEY][BATCH_DELAYS_KEY] for state in states]
    if None in of_replicas:
        return None
    delays_s: dict[str, float] = {}
    for of_replica in of_replicas:
        for batch_id, seconds in of_replica.items():
            delays_s[batch_id] = delays_s.get(batch_id, 0.0) + seconds
    return delays_s


def replicas_info(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what ``/server_info`` says of co-serving, from the internal state of each replica.

    Raises:
        StartupError: a scheduler is not ours.
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
