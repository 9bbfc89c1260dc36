"""Objects and events of background responses, as OpenAI's Responses API has them.

What a stream says follows from the object alone, so it can be resumed at any event, also after a
restart: three events before there is an answer, and the answer's when it is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from sglang_coserve.batch.record import JobRecord, Status

_REPEATED: Final = (
    *("model", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls"),
    *("reasoning", "temperature", "tool_choice", "top_logprobs", "top_p", "truncation", "user"),
)
"""Fields of a request that its object has from the start. Not those that may be large."""

_DEFAULTS: Final[Mapping[str, Any]] = {
    "model": "default",
    "instructions": None,
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "temperature": None,
    "top_p": None,
    "usage": None,
}
_ACTIVE: Final = ("queued", "in_progress")


def response_id_of(batch: JobRecord) -> str:
    """Return the id of the response that a batch is."""
    return f"resp_{batch.id.removeprefix('batch_')}"


def batch_id_of(response_id: str) -> str:
    """Return the id of the batch that a response is."""
    return f"batch_{response_id.removeprefix('resp_')}"


def repeated_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the object repeats of a request's body."""
    return {name: body[name] for name in _REPEATED if body.get(name) is not None}


def response_object(
    batch: JobRecord, record: Mapping[str, Any] | None, *, is_in_engine: bool
) -> dict[str, Any]:
    """Return the object of the response that ``batch`` is.

    ``record`` is that of its line, once the batch is complete; see ``encode_record``.
    """
    assert batch.response is not None
    answer, error = _outcome(batch, record)
    status = "failed" if error else _status(batch, is_in_engine=is_in_engine)
    return {
        **_DEFAULTS,
        **batch.response,
        "status": status,
        "incomplete_details": None,
        "output": [],
        **answer,
        "id": response_id_of(batch),
        "object": "response",
        "created_at": int(batch.created_at_s),
        "completed_at": None if batch.completed_at_s is None else int(batch.completed_at_s),
        "background": True,
        "error": error or answer.get("error"),
        "metadata": batch.response.get("metadata", {}),
        "service_tier": "flex",
        "store": True,
    }


def has_ended(response: Mapping[str, Any]) -> bool:
    """Return whether a response will not change any more."""
    return response["status"] not in _ACTIVE


def _status(batch: JobRecord, *, is_in_engine: bool) -> str:
    match batch.status:
        case Status.COMPLETED:
            return "completed"
        case Status.CANCELLING | Status.CANCELLED:
            return "cancelled"
    is_answered = batch.progress.lines > 0
    return "in_progress" if is_in_engine or is_answered else "queued"


def _outcome(
    batch: JobRecord, record: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Return the engine's answer, empty while there is none, and what went wrong."""
    if batch.status is Status.FAILED:
        return {}, _error("; ".join(fault.message for fault in batch.faults))
    if batch.is_past_deadline:
        return {}, _error(f"not finished within {batch.completion_window}")
    if record is None:
        return {}, None
    if record["error"] is not None:
        return {}, _error(record["error"]["message"])
    answered = record["response"]
    if answered["status_code"] >= 300:
        return {}, _error(answered["body"]["error"]["message"], is_request=True)
    return dict(answered["body"]), None


def _error(message: str, *, is_request: bool = False) -> dict[str, str]:
    # Of the codes that OpenAI's object may have, the closest ones.
    return {"code": "invalid_prompt" if is_request else "server_error", "message": message}


def opening_events(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events before the answer, as far as the response has come."""
    before = {**response, "output": [], "usage": None, "error": None}
    before |= {"completed_at": None, "incomplete_details": None}
    steps = ["created", "queued"]
    if response["status"] != "queued":
        steps.append("in_progress")
    for step in steps:
        status = "in_progress" if step == "in_progress" else "queued"
        yield {"type": f"response.{step}", "response": {**before, "status": status}}


def answer_events(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a response that has ended."""
    for index, item in enumerate(response["output"]):
        place = {"output_index": index, "item_id": item.get("id")}
        begun = {**item, "status": "in_progress"}
        if item["type"] == "message":
            begun["content"] = []
        elif item["type"] == "function_call":
            begun["arguments"] = ""
        yield {"type": "response.output_item.added", "output_index": index, "item": begun}
        if item["type"] == "message":
            for at, part in enumerate(item["content"]):
                yield from _part_events(part, {**place, "content_index": at})
        elif item["type"] == "function_call":
            said, kind = item["arguments"], "response.function_call_arguments"
            yield {"type": f"{kind}.delta", **place, "delta": said}
            yield {"type": f"{kind}.done", **place, "name": item["name"], "arguments": said}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    # OpenAI has no event of its own for a cancelled one.
    status = response["status"]
    kind = "failed" if status == "cancelled" else status
    yield {"type": f"response.{kind}", "response": response}


def _part_events(part: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    is_text = part["type"] == "output_text"
    begun = {**part, "text": "", "annotations": []} if is_text else part
    yield {"type": "response.content_part.added", **place, "part": begun}
    if is_text:
        logprobs = part.get("logprobs") or []
        said = {**place, "logprobs": logprobs}
        yield {"type": "response.output_text.delta", **said, "delta": part["text"]}
        yield {"type": "response.output_text.done", **said, "text": part["text"]}
    yield {"type": "response.content_part.done", **place, "part": part}
