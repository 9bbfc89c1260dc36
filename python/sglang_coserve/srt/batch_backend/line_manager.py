"""SGLang's tokenizer manager for the handler of one line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from fastapi import HTTPException
from sglang.srt.managers.io_struct import EmbeddingReqInput

from sglang_coserve.lines.backend import LineRequest
from sglang_coserve.srt import compat
from sglang_coserve.srt.batch_backend.endpoints import OnLoop
from sglang_coserve.srt.compat.requests import can_continue
from sglang_coserve.srt.marks.offline_marks import Marks, offline_marks, sent_with
from sglang_coserve.srt.monitoring.scheduler_query import moved_tokens

_LAST_TOKENS_S: Final = 10.0
"""How long to wait for the tokens of a line that is taken out: the engine gives them at the end of
its step, and no step that was measured takes so long."""

_STREAM_INTERVAL_TOKENS: Final = 16
"""Interval in tokens at which a line's new tokens are reported. SGLang's own is 50; each report is
a message between processes."""


class LineManager:
    """Marks the line's request and continues it; the handler gets the final output alone.

    Everything else is SGLang's manager's. The handler runs in a ``HandlerThread``.
    """

    def __init__(
        self,
        inner: Any,
        line: LineRequest,
        request_id: str,
        on_tokens: Callable[[Sequence[int]], None],
        *,
        kv_model: str,
        takes_kv: bool,
    ) -> None:
        """Prepare to serve ``line``.

        Args:
            inner: SGLang's tokenizer manager.
            line: What is served; SGLang's handler has its body.
            request_id: Its name in the engine.
            on_tokens: Called with the output tokens after the line's as they come, but for the last
                ones: those are in the answer. So it never gets a complete generation. When the line
                is cancelled, it gets what the engine has generated until then.
            kv_model: Whose KV the request's is.
            takes_kv: Whether to go on with what another engine has left of the request.
        """
        self._inner = inner
        self._line = line
        self.request_id = request_id
        self._on_tokens = on_tokens
        self.kv_model = kv_model
        self._takes_kv = takes_kv

        self.failure: str | None = None
        """Why the engine failed on the request; None when it did not."""

        self.is_leaving = False
        """Whether the engine was asked to let the request go on elsewhere."""

        self.tokens_left: int | None = None
        """How many tokens' KV was left when it went, 0 for none; None as long as it has not."""

        self.prompt_tokens: int | None = None
        """How long the request is without its output; None before its first tokens."""

        self._is_continuable = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def can_leave(self) -> bool:
        """Whether the scheduler has the request, and another one could go on after its tokens."""
        state = self._inner.rid_to_state.get(self.request_id)
        return self._is_continuable and state is not None and state.dispatched

    async def generate_request(self, request: Any, _raw_request: Any = None) -> AsyncIterator[Any]:
        """Serve SGLang's ``request`` and yield its final output, once.

        Raises:
            ValueError: the request is at fault, or ``failure`` says why the engine is.
            HTTPException: ``failure`` says why the engine is at fault.
        """
        try:
            output = await OnLoop(partial(self._final_output, request))
            if self.tokens_left is not None:
                raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "the line goes on elsewhere")
            _raise_if_aborted(output)
        except compat.aborted_errors() as error:  # A ValueError, but not the request's fault.
            self.failure = str(error)
            raise
        except ValueError:
            raise
        except HTTPException as error:
            if error.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
                self.failure = error.detail
            raise
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise
        yield output

    async def _final_output(self, request: Any) -> Any:
        """Return what SGLang would have answered without streaming.

        To be cancelled is enough to abort the request: SGLang then does it itself. The tokens that
        it has until then are waited for.
        """
        feed, marks = self._prepare(request)
        try:
            with sent_with(marks):
                output = await self._served(request, feed)
            if self.is_leaving and feed is not None:
                self._note_departure(output, feed)
            return output
        except asyncio.CancelledError:
            if feed is not None:
                feed.update(await self._tokens_at_abort())
            raise

    async def _served(self, request: Any, feed: _TokenFeed | None) -> Any:
        is_delta = feed is not None and self._inner.incremental_streaming_output
        output: Any = None
        output_ids: list[int] = []
        texts: list[str] = []
        async with aclosing(self._inner.generate_request(request)) as outputs:
            async for output in outputs:
                if feed is None:
                    continue
                # SGLang does not say it of a request that is aborted while it waits.
                self.prompt_tokens = output["meta_info"].get("prompt_tokens", self.prompt_tokens)
                if is_delta:
                    texts.append(output["text"])
                    output_ids += output["output_ids"]
                else:
                    output_ids = output["output_ids"]
                if output["meta_info"]["finish_reason"] is None:
                    feed.update(output_ids)
        if is_delta:
            output = {**output, "text": "".join(texts), "output_ids": output_ids}
        return output

    def _note_departure(self, output: Any, feed: _TokenFeed) -> None:
        """Take the tokens of a request that has left, unless it has ended before."""
        reason = output["meta_info"]["finish_reason"]
        if reason["type"] != "abort":
            return
        moved = moved_tokens(reason.get("message"))
        self.tokens_left = moved or 0
        # The last token of one that was aborted is left out, as in ``_tokens_at_abort``.
        feed.update(output["output_ids"] if moved is not None else output["output_ids"][:-1])

    async def _tokens_at_abort(self) -> list[int]:
        """Return the output tokens of the request that is being aborted, once the engine has let it
        go.

        Without the last one: SGLang takes it from the step under way, and does not look any more
        whether it ends the generation.
        """
        state = self._inner.rid_to_state.get(self.request_id)
        if state is None:
            return []  # The engine never had it.
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_TOKENS_S):
                while not state.finished:
                    state.event.clear()
                    await state.event.wait()
        return list(state.output_ids[:-1])

    def _prepare(self, request: Any) -> tuple[_TokenFeed | None, Marks]:
        """Mark a request as one of a line; return the receiver of its tokens, and its marks. There
        is no receiver if the request cannot be continued.
        """
        line = self._line
        is_embedding = isinstance(request, EmbeddingReqInput)
        is_continuable = not is_embedding and can_continue(
            request, self._inner.preferred_sampling_params
        )
        marks = offline_marks(
            due_in_s=None if line.deadline_s is None else line.deadline_s - time.time(),
            job=line.batch_id,
            generated=line.generated if is_continuable else (),
            expected_output_tokens=line.expected_output_tokens,
            moved_kv=self._kv_mark() if is_continuable else None,
        )
        self._is_continuable = is_continuable
        if is_continuable:
            request.stream = True
            params = dict(request.sampling_params or {})
            request.sampling_params = {**params, "stream_interval": _STREAM_INTERVAL_TOKENS}
        if not is_embedding:
            request.extra_key = _extended(request.extra_key, self._inner.coserve_weights.cache_key)
        # A client's id could be that of another line. For several inputs, an embedding request
        # takes no single id.
        request.rid = None if is_embedding else self.request_id
        feed = _TokenFeed(line.generated, self._on_tokens) if is_continuable else None
        return feed, marks

    def _kv_mark(self) -> tuple[str, int, str] | None:
        kv = self._line.kv if self._takes_kv else None
        return None if kv is None else (kv.name, kv.tokens, self.kv_model)


class _TokenFeed:
    """Reports new output tokens."""

    def __init__(
        self, generated: Sequence[int], on_tokens: Callable[[Sequence[int]], None]
    ) -> None:
        self._generated = list(generated)
        self._on_tokens = on_tokens
        self._num_reported = len(self._generated)

    def update(self, output_ids: list[int]) -> None:
        """Take all output tokens so far; they only ever become more."""
        is_first = self._num_reported == len(self._generated)
        if is_first and output_ids[: self._num_reported] != self._generated:
            return  # The scheduler has started over: they do not follow on those before.
        new_ids = output_ids[self._num_reported :]
        self._num_reported += len(new_ids)
        if new_ids:
            self._on_tokens(new_ids)


def _extended(extra_key: Any, cache_key: str) -> Any:
    """Return what a request's cached prefixes are found under, its own key or keys included."""
    if not cache_key:
        return extra_key
    if isinstance(extra_key, list):
        return [f"{key}|{cache_key}" for key in extra_key]
    return f"{extra_key or ''}|{cache_key}"


def _raise_if_aborted(output: Any) -> None:
    """SGLang answers an abort as if it were an end; in a stream, also that of a bad request."""
    for item in output if isinstance(output, list) else [output]:
        reason = item["meta_info"].get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            message = reason.get("message") or "aborted"
            if reason.get("status_code") == HTTPStatus.BAD_REQUEST:
                raise ValueError(message)
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, message)
