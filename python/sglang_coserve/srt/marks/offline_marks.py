"""Marks that the server itself sends to the scheduler, e.g. with a line of a batch.

They travel in ``custom_params`` like other marks (``request_marks``).  Clients can set
that field, too, so the server's marks are added only after the client's have
been checked; until then a context variable holds them.

A deadline is sent as the time left, counted from the arrival in the
scheduler: this needs no clock shared with the sender, and all ranks, which
take the arrival time from rank 0, compute the same deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from sglang_coserve.core.request import RequestClass
from sglang_coserve.srt.marks.request_marks import CLASS_KEY, DEADLINE_KEY, mark_of

_ARRIVAL_KEY: Final = "_coserve_arrival_s"
_DUE_IN_KEY: Final = "_coserve_due_in_s"
_EXPECTED_KEY: Final = "_coserve_expected_tokens"
_JOB_KEY: Final = "_coserve_job"
_GENERATED_KEY: Final = "_coserve_generated"
_MOVED_KV_KEY: Final = "_coserve_moved_kv"

Req = Any
Marks = Mapping[str, float | str | list[int] | tuple[str, int, str]]

_MARKS: Final[ContextVar[Marks | None]] = ContextVar(
    "marks of the request being sent", default=None
)

logger = logging.getLogger(__name__)


def offline_marks(
    *,
    due_in_s: float | None,
    job: str,
    generated: Sequence[int] = (),
    expected_output_tokens: int | None = None,
    moved_kv: tuple[str, int, str] | None = None,
) -> Marks:
    """Return the marks of an offline request.

    ``due_in_s`` is the time left until its deadline, negative when that has passed, None if it
    has none; ``job`` is the batch that it is a line of; ``generated`` are the output tokens that
    it goes on after, ``expected_output_tokens`` is how many it is expected to have in the end,
    None if nothing is known. ``moved_kv`` is under which name KV was left for it, of how many
    tokens, and of which model.
    """
    marks: dict[str, float | str | list[int] | tuple[str, int, str]] = {
        CLASS_KEY: RequestClass.OFFLINE.value,
        _JOB_KEY: job,
    }
    if due_in_s is not None:
        marks[_DUE_IN_KEY] = due_in_s
    if expected_output_tokens is not None:
        marks[_EXPECTED_KEY] = expected_output_tokens
    if generated:
        marks[_GENERATED_KEY] = list(generated)
    if moved_kv is not None:
        marks[_MOVED_KV_KEY] = moved_kv
    return marks


@contextmanager
def sent_with(marks: Marks) -> Iterator[None]:
    """Make ``attach_marks`` add ``marks`` to requests that this task sends in this context."""
    token = _MARKS.set(marks)
    try:
        yield
    finally:
        _MARKS.reset(token)


def attach_marks(sampling_params: Any) -> None:
    """Add the marks of the current task, if any, to SGLang's checked ``SamplingParams``."""
    marks = _MARKS.get()
    if marks is not None:
        _add(sampling_params, marks)


def mark_arrival(received: Any, arrival_s: float) -> None:
    """Note in the message of a request, on its way to all ranks, when it arrived on rank 0."""
    _add(received.sampling_params, {_ARRIVAL_KEY: arrival_s})


def marked_arrival_s(req: Req) -> float | None:
    """Return what ``mark_arrival`` noted in the message of ``req``; None if nothing."""
    arrival_s: float | None = mark_of(req, _ARRIVAL_KEY)
    return arrival_s


def deadline_of(req: Req, arrival_s: float) -> float | None:
    """Return the deadline of ``req`` on the clock of ``arrival_s``; None without one."""
    due_in_s = mark_of(req, _DUE_IN_KEY)
    if due_in_s is None:
        due_in_s = mark_of(req, DEADLINE_KEY)
    return None if due_in_s is None else arrival_s + due_in_s


def expected_tokens_of(req: Req) -> int | None:
    """Return the expected number of output tokens of ``req``; None if unknown."""
    tokens: int | None = mark_of(req, _EXPECTED_KEY)
    return tokens


def job_of(req: Req) -> str | None:
    """Return the batch that ``req`` is a line of; None if it is none."""
    job: str | None = mark_of(req, _JOB_KEY)
    return job


def take_moved_kv(req: Req) -> tuple[str, int, str] | None:
    """Return what a new request says of KV that was left for it; None where it has said so before,
    or there is none."""
    custom_params = req.sampling_params.custom_params
    moved = custom_params.pop(_MOVED_KV_KEY, None) if isinstance(custom_params, dict) else None
    return None if moved is None else tuple(moved)


def restore_generated(req: Req, think_end_ids: Sequence[int] | None) -> None:
    """Restore the output tokens that a new request brings along; done once.

    SGLang then treats it like a retracted request: the prompt and these tokens are
    prefilled, and stop conditions, limits, usage and text see one generation.
    ``think_end_ids`` are the tokens that end thinking, for the count of reasoning tokens.

    The request starts over if its state is more than its tokens (grammar, image
    positions, log-probabilities), or if the tokens are invalid (outside of the vocabulary, or
    too many).
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


def _add(sampling_params: Any, marks: Marks) -> None:
    sampling_params.custom_params = {**(sampling_params.custom_params or {}), **marks}
