"""Questions to the schedulers of a server that SGLang has no request for.

They travel as the names of requests for its internal state, and are answered without what SGLang
adds to that: it takes time, and some of it (means since the last call) starts anew with each call.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sglang_coserve.errors import StartupError

STANDING: Final = "standing"
"""How both classes stand now: ``SchedulerStatus.state``."""

BATCH_DELAYS: Final = "batch delays"
"""By how much batches have delayed online requests: ``SchedulerStatus.batch_delays_s``."""

PULSE: Final = "pulse"
"""The error that stopped offline work, or None. Any answer shows that a scheduler runs."""

LAST_STEPS: Final = "last steps"
"""The steps that ended in a span of time: ``SchedulerStatus.last_steps``."""

LONGEST_STEPS: Final = "longest steps"
"""The longest steps of so many last seconds, at most so many: ``SchedulerStatus.longest_steps``."""

STEPS_OF: Final = "steps of"
"""The kept steps of a request, by its id: ``SchedulerStatus.steps_of``."""

LEAVE: Final = "leave"
"""That requests leave, by their ids, with their KV, which is that of a model. The answer is those
that do. Each of them ends with a ``moved_reason``."""

STATUS: Final = "status queries"
"""The part that answers them, by its name in ``Advisory``."""

ANSWER_KEY: Final = "coserve_answer"
_MARK: Final = "coserve: "
_MOVED: Final = "coserve: moved with the KV of tokens: "


async def ask(manager: Any, question: str, *arguments: object) -> list[Any]:
    """Return the answer of each scheduler; ``manager`` is SGLang's tokenizer manager."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager.auto_create_handle_loop()
    request = GetInternalStateReq(rid=_MARK + json.dumps([question, *arguments]))
    # To its end, or SGLang would take the answer for that of the next question.
    answers = await asyncio.shield(manager.get_internal_state_communicator(request))
    return [answer.internal_state[ANSWER_KEY] for answer in answers]


def asked(rid: str | None) -> tuple[str, list[Any]] | None:
    """Return the question in a request of this name, and its arguments; None if it is SGLang's."""
    if rid is None or not rid.startswith(_MARK):
        return None
    question, *arguments = json.loads(rid.removeprefix(_MARK))
    return question, arguments


def moved_reason(tokens: int) -> str:
    """Return why a request has ended that has left; the KV of so many tokens with it."""
    return f"{_MOVED}{tokens}"


def moved_tokens(reason: str | None) -> int | None:
    """Return the tokens in a ``moved_reason``; None for any other reason."""
    if reason is None or not reason.startswith(_MOVED):
        return None
    return int(reason.removeprefix(_MOVED))


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
    return {
        "offline_policy": ours[0]["config"]["offline_policy"],
        EXPECTED_RATE_KEY: sum(state[EXPECTED_RATE_KEY] for state in ours),
    }
