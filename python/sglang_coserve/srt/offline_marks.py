"""What a line of a batch tells the scheduler, beside its class.

It travels in ``custom_params`` as other marks do (``request_marks``).  Clients fill
that field too, so it is filled with these marks only when what the client sent has
been checked: until then a context variable holds them.

A deadline travels as the time left, and counts from the arrival in the
scheduler: that needs no clock in common with the sender, and all ranks, which
take the arrival from rank 0, come to the same moment.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from sglang_coserve.core.request import RequestClass
from sglang_coserve.srt.request_marks import CLASS_KEY, DEADLINE_KEY

__all__ = [
    "attach_marks",
    "deadline_of",
    "expected_tokens_of",
    "job_of",
    "offline_marks",
    "restore_generated",
    "sent_with",
    "tenant_marks",
    "user_of",
]

_DUE_IN_KEY: Final = "_coserve_due_in_s"
_EXPECTED_KEY: Final = "_coserve_expected_tokens"
_JOB_KEY: Final = "_coserve_job"
_USER_KEY: Final = "_coserve_user"
_GENERATED_KEY: Final = "_coserve_generated"

Req = Any
Marks = Mapping[str, float | str | list[int]]

_MARKS: Final[ContextVar[Marks | None]] = ContextVar(
    "marks of the request being sent", default=None
)

logger = logging.getLogger(__name__)


def offline_marks(
    *,
    due_in_s: float,
    job: str,
    generated: Sequence[int] = (),
    expected_output_tokens: int | None = None,
) -> Marks:
    """Return the marks of an offline request.

    ``due_in_s`` is the time left until its deadline, negative when that has passed; ``job`` is
    the batch that it is a line of; ``generated`` are the output tokens that it goes on after,
    ``expected_output_tokens`` is how many it is expected to have in the end, None if nothing is
    known.
    """
    marks: dict[str, float | str | list[int]] = {
        CLASS_KEY: RequestClass.OFFLINE.value,
        _DUE_IN_KEY: due_in_s,
        _JOB_KEY: job,
    }
    if expected_output_tokens is not None:
        marks[_EXPECTED_KEY] = expected_output_tokens
    if generated:
        marks[_GENERATED_KEY] = list(generated)
    return marks


def tenant_marks(tenant: str) -> Marks:
    """Return the marks of a request of either class that belongs to a tenant."""
    return {_USER_KEY: tenant}


@contextmanager
def sent_with(marks: Marks) -> Iterator[None]:
    """Within it, ``attach_marks`` gives requests of this task ``marks``."""
    token = _MARKS.set(marks)
    try:
        yield
    finally:
        _MARKS.reset(token)


def attach_marks(sampling_params: Any) -> None:
    """Give SGLang's checked ``SamplingParams`` the marks of the task that sends them, if any."""
    marks = _MARKS.get()
    if marks is not None:
        sampling_params.custom_params = {**(sampling_params.custom_params or {}), **marks}


def deadline_of(req: Req, arrival_s: float) -> float | None:
    """Return when ``req`` should be finished, on the clock of its arrival; None: at any time."""
    due_in_s = _mark(req, _DUE_IN_KEY)
    if due_in_s is None:
        due_in_s = _mark(req, DEADLINE_KEY)
    return None if due_in_s is None else arrival_s + due_in_s


def expected_tokens_of(req: Req) -> int | None:
    """Return how many output tokens ``req`` is expected to have; None if nothing is known."""
    tokens: int | None = _mark(req, _EXPECTED_KEY)
    return tokens


def job_of(req: Req) -> str | None:
    """Return the batch that ``req`` is a line of; None if it is none."""
    job: str | None = _mark(req, _JOB_KEY)
    return job


def user_of(req: Req) -> str | None:
    """Return the tenant whom fairness counts ``req`` for; None when it has none."""
    user: str | None = _mark(req, _USER_KEY)
    return user


def restore_generated(req: Req, think_end_ids: Sequence[int] | None) -> None:
    """Give a request that has yet to run the output tokens it brings along, once.

    It then is what a retracted request is to SGLang: the prompt and these tokens are
    prefilled, and stop conditions, limits, usage and text see one generation.
    ``think_end_ids`` is the model's end of thinking, for the count of reasoning tokens.

    The request starts over when its state is more than its tokens (grammar, image
    positions, log-probabilities), or the tokens cannot be its own: another vocabulary,
    or too many.
    """
    custom_params = req.sampling_params.custom_params
    if not isinstance(custom_params, dict):
        return
    generated = custom_params.pop(_GENERATED_KEY, None)
    if generated is None or req.output_ids:
        return
    is_restorable = (
        req.grammar is None
        and req.multimodal_inputs is None
        and not req.return_logprob
        and len(generated) < req.sampling_params.max_new_tokens
        and all(0 <= token < req.vocab_size for token in generated)
    )
    if not is_restorable:
        logger.warning("request %s cannot be continued from its tokens: starting over", req.rid)
        return
    req.output_ids.extend(generated)
    if req.require_reasoning and think_end_ids:
        req.update_reasoning_tokens(generated, think_end_ids)


def _mark(req: Req, key: str) -> Any:
    custom_params = req.sampling_params.custom_params
    return custom_params.get(key) if isinstance(custom_params, dict) else None
