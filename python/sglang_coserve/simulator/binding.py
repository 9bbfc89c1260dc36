"""Supplies the requests of a simulation, made from those of workloads."""

from __future__ import annotations

import heapq
import json
import math
from array import array
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from sglang_coserve.core.offline_queue import PackedTokens, pack_tokens
from sglang_coserve.core.offline_queue.request import TOKEN_BYTES
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.errors import InputFileError, unreadable
from sglang_coserve.jsonl.request_line import OUTPUT_LIMITS
from sglang_coserve.simulator.request import SimRequest
from sglang_coserve.workload.shape import prompt_token_ids
from sglang_coserve.workload.trace import TraceRequest


class TrafficSource:
    """Timed arrivals in order, and a backlog that keeps the offline queue filled."""

    def __init__(
        self,
        timed: Iterable[Iterable[SimRequest]] = (),
        backlog: Iterable[SimRequest] = (),
        backlog_depth: int = 0,
    ) -> None:
        """Merge ``timed`` streams, each in arrival order.

        ``backlog`` requests arrive when fewer than ``backlog_depth`` offline requests wait.
        """
        self._timed = heapq.merge(*timed, key=_arrival_s)
        self._next = next(self._timed, None)
        self._backlog: Iterator[SimRequest] = iter(backlog)
        self._backlog_depth = backlog_depth

    @property
    def next_arrival_s(self) -> float:
        """Arrival time of the next timed request; infinite if there is none."""
        return math.inf if self._next is None else self._next.info.arrival_s

    def arrived(self, until_s: float) -> Iterator[SimRequest]:
        """Yield and remove the timed requests that arrive at or before ``until_s``."""
        while self._next is not None and self._next.info.arrival_s <= until_s:
            request, self._next = self._next, next(self._timed, None)
            yield request

    def close(self) -> None:
        """Discard all remaining timed requests."""
        self._next = None

    def refill(self, num_waiting: int, now_s: float) -> Iterator[SimRequest]:
        """Yield the requests that are missing to reach ``backlog_depth``, arriving now."""
        for _ in range(num_waiting, self._backlog_depth):
            request = next(self._backlog, None)
            if request is None:
                return
            request.arrive_at(now_s)
            yield request


def _arrival_s(request: SimRequest) -> float:
    return request.info.arrival_s


_TEXT_BYTES = 4
_VOCAB_SIZE = 2**31
_DEFAULT_OUTPUT_TOKENS = 256

_FIRST_OWN_ID: Final = 2**32
"""Above all ids of shared prefixes, of texts and of outputs."""


def from_trace(
    requests: Iterable[TraceRequest],
    request_class: RequestClass,
    *,
    seed: int = 0,
    max_new_tokens: int | None = None,
) -> Iterator[SimRequest]:
    """Yield the requests of a trace, all of one class.

    Prompts get token ids with the common prefixes given by the trace, generated when
    first needed. The scheduler sees ``max_new_tokens`` as the limit, or the
    true output length if None; longer outputs are cut to it.

    Raises:
        InputFileError: a prompt or output length is below 1.
    """
    # Serials of online requests are even, those of offline ones odd, so outputs always differ.
    parity = request_class is RequestClass.OFFLINE
    for request in requests:
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise InputFileError(
                f"{request_class.value} request {request.index}: {request.prompt_tokens} prompt "
                f"and {request.output_tokens} output tokens: both must be at least 1 "
                "(fit_to_context leaves out requests that failed when recorded)"
            )
        limit = max_new_tokens or request.output_tokens
        serial = 2 * request.index + parity
        yield SimRequest(
            RequestInfo(
                rid=f"{request_class.value}-{request.index}",
                request_class=request_class,
                prompt_tokens=request.prompt_tokens,
                max_new_tokens=limit,
                arrival_s=request.arrival_s,
            ),
            min(request.output_tokens, limit),
            partial(_trace_prompt, request, seed + parity, serial),
            serial,
        )


def _trace_prompt(request: TraceRequest, seed: int, serial: int) -> PackedTokens:
    if not request.hash_ids:
        # Nobody shares more of a prompt than what is before the first different id.
        own_id = pack_tokens([_FIRST_OWN_ID + serial])
        return PackedTokens(own_id.ljust(request.prompt_tokens * TOKEN_BYTES, b"\0"))
    token_ids = prompt_token_ids(request, vocab_size=_VOCAB_SIZE, seed=seed)
    return PackedTokens(token_ids.astype(f"u{TOKEN_BYTES}").tobytes())


def from_jsonl(path: str | Path) -> Iterator[SimRequest]:
    """Yield the lines of a batch file in OpenAI's format as offline requests that arrive at 0.

    Without a tokenizer, every 4 bytes of a prompt's text count as one
    token, about right for English, and common prefixes are preserved. The output
    is as long as the line's limit, such as ``max_tokens``, else 256; of an embedding, one token.

    Raises:
        InputFileError: the file cannot be read or holds no request; or a line has no usable body.
    """
    path = Path(path)
    index = 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _from_line(line, f"{path}:{number}", index)
                    index += 1
    except (OSError, UnicodeDecodeError) as error:
        raise InputFileError(unreadable(path, error)) from error
    if index == 0:
        raise InputFileError(f"{path}: the file holds no request")


def _from_line(line: str, where: str, index: int) -> SimRequest:
    try:
        request = json.loads(line)
        body = request["body"]
        text = _text_of(body)
        limits = ((name, body[name]) for name in OUTPUT_LIMITS if body.get(name) is not None)
        is_embedding = str(request.get("url")).endswith("/embeddings")
        name, limit = next(limits, ("", 1 if is_embedding else _DEFAULT_OUTPUT_TOKENS))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputFileError(
            f"{where}: not a batch request with a prompt: {type(error).__name__}: {error}"
        ) from error
    if type(limit) is not int or limit < 1:
        raise InputFileError(f"{where}: {name}: expected a whole number from 1 up, got {limit!r}")
    data = text.encode(errors="replace")  # Half a surrogate pair is no UTF-8.
    tokens = pack_tokens(array("I", data + b"\0" * (-len(data) % _TEXT_BYTES)))
    if not tokens:
        raise InputFileError(f"{where}: the prompt is empty")
    info = RequestInfo(
        rid=f"offline-{index}",
        request_class=RequestClass.OFFLINE,
        prompt_tokens=len(tokens) // TOKEN_BYTES,
        max_new_tokens=limit,
        arrival_s=0.0,
    )
    return SimRequest(info, limit, lambda: tokens, 2 * index + 1)


def _text_of(body: Any) -> str:
    """Return the text of a chat, completion, embedding or responses body."""
    said = [_content(body[name]) for name in ("tools", "instructions") if body.get(name)]
    for message in body.get("messages", ()):
        parts = [message[name] for name in ("content", "tool_calls") if message.get(name)]
        said += [f"{_content(part)}\n" for part in (message["role"], *parts)]
    return "".join(said + [_content(body[name]) for name in ("prompt", "input") if body.get(name)])


def _content(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
