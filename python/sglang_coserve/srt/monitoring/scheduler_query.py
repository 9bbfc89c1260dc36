"""Questions to the schedulers of a server that SGLang has no request for.

They travel as the names of requests for its internal state, and are answered without what SGLang
adds to that: it takes time, and some of it (means since the last call) starts anew with each call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from sglang_coserve.core.advisory import Advisory
from sglang_coserve.srt.monitoring.status import SchedulerStatus

__all__ = [
    "BATCH_DELAYS",
    "PULSE",
    "STANDING",
    "STATUS",
    "answer",
    "ask",
    "last_steps",
    "leave",
    "moved_reason",
    "moved_tokens",
]

STANDING: Final = "coserve-standing"
"""How both classes stand now: ``SchedulerStatus.state``."""

BATCH_DELAYS: Final = "coserve-batch-delays"
"""By how much batches have delayed online requests: ``SchedulerStatus.batch_delays_s``."""

PULSE: Final = "coserve-pulse"
"""Whether they run."""

STATUS: Final = "status queries"
"""The part that answers them, by its name in ``Advisory``."""

_LAST_STEPS: Final = "coserve-last-steps-"
_LEAVE: Final = "coserve-leave-"
_MOVED: Final = "coserve: moved with the KV of tokens: "
_ANSWER_KEY: Final = "coserve_answer"


def last_steps(seconds: float) -> str:
    """Return the question for the trace events of the last ``seconds``."""
    return f"{_LAST_STEPS}{seconds}"


def leave(rids: Sequence[str], model: str) -> str:
    """Return the demand that requests leave with their KV, which is that of ``model``.

    The answer is those that do. Each of them ends with a ``moved_reason``.
    """
    return _LEAVE + json.dumps([list(rids), model])


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
    return [answer.internal_state[_ANSWER_KEY] for answer in answers]


def answer(
    question: str | None,
    status: SchedulerStatus,
    let_leave: Callable[[Sequence[str], str], list[str]],
    advisory: Advisory,
) -> dict[str, Any] | None:
    """Return the internal state that answers ``question``; None if it is none of ours."""
    if question == STANDING:
        return {_ANSWER_KEY: advisory.ask(STATUS, status.state, {})}
    if question == PULSE:
        return {_ANSWER_KEY: True}
    if question == BATCH_DELAYS:
        return {_ANSWER_KEY: advisory.ask(STATUS, status.batch_delays_s, None)}
    if question is not None and question.startswith(_LAST_STEPS):
        seconds = float(question.removeprefix(_LAST_STEPS))
        return {_ANSWER_KEY: advisory.ask(STATUS, lambda: status.last_steps(seconds), [])}
    if question is not None and question.startswith(_LEAVE):
        return {_ANSWER_KEY: let_leave(*json.loads(question.removeprefix(_LEAVE)))}
    return None
