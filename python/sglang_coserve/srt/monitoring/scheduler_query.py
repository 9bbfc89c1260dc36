"""Questions to the schedulers of a server that SGLang has no request for.

They travel as the names of requests for its internal state, and are answered without what SGLang
adds to that: it takes time, and some of it (means since the last call) starts anew with each call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sglang_coserve.errors import StartupError

STANDING: Final = "coserve-standing"
"""How both classes stand now: ``SchedulerStatus.state``."""

BATCH_DELAYS: Final = "coserve-batch-delays"
"""By how much batches have delayed online requests: ``SchedulerStatus.batch_delays_s``."""

PULSE: Final = "coserve-pulse"
"""Whether they run."""

STATUS: Final = "status queries"
"""The part that answers them, by its name in ``Advisory``."""

LAST_STEPS: Final = "coserve-last-steps-"
LEAVE: Final = "coserve-leave-"
_MOVED: Final = "coserve: moved with the KV of tokens: "
ANSWER_KEY: Final = "coserve_answer"


def last_steps(seconds: float) -> str:
    """Return the question for the trace events of the last ``seconds``."""
    return f"{LAST_STEPS}{seconds}"


def leave(rids: Sequence[str], model: str) -> str:
    """Return the demand that requests leave with their KV, which is that of ``model``.

    The answer is those that do. Each of them ends with a ``moved_reason``.
    """
    return LEAVE + json.dumps([list(rids), model])


def moved_reason(tokens: int) -> str:
    """Return why a request has ended that has left; the KV of so many tokens with it."""
    return f"{_MOVED}{tokens}"


def moved_tokens(reason: str | None) -> int | None:
    """Return the tokens in a ``moved_reason``; None for any other reason."""
    if reason is None or not reason.startswith(_MOVED):
        return None
    return int(reason.removeprefix(_MOVED))


async def ask(manager: Any, question: str) -> list[Any]:
    """Return the answer of each scheduler; ``manager`` is SGLang's tokenizer manager."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager.auto_create_handle_loop()
    answers = await manager.get_internal_state_communicator(GetInternalStateReq(rid=question))
    return [answer.internal_state[ANSWER_KEY] for answer in answers]


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
