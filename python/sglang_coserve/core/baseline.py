"""What online requests would have got without offline work: the no-interference baseline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from sglang_coserve.core.batch_stats import BatchStats

__all__ = ["Baseline", "BaselineToken", "EngineSize"]


class BaselineToken(NamedTuple):
    """One output token, and when it would have come out."""

    rid: str
    number: int
    """From 1."""

    at_s: float


@dataclass(slots=True)
class _Request:
    rid: str
    arrival_s: float
    prompt_left_tokens: int
    """Of the prompt, still to be computed here."""

    context_tokens: int
    """With KV here."""

    generated_tokens: int = 0
    """Here."""

    known_tokens: int = 0
    """That really came out."""

    has_ended: bool = False
    """No token comes after the known ones."""

    @property
    def has_all(self) -> bool:
        """True when it has every token here that it ever gets."""
        return self.has_ended and self.generated_tokens >= self.known_tokens


class Baseline:
    """A virtual engine that serves the online requests of a real one, and nothing else.

    It runs the steps that SGLang would run: prompts in order of arrival up to a chunk,
    without decodes unless they are mixed, else every decode. A latency model says how long
    each step takes. How many tokens a request generates is known only as the real engine
    generates them, so a decode step waits until every token that it would produce is known.
    The real engine has the same requests and more work, so it is behind, and the wait is
    short: mostly the step that the real engine runs.

    A step costs O(its rows), amortized one for each real step with online rows.
    """

    def __init__(
        self, *, chunk_tokens: int, max_rows: int, kv_tokens: int, mixes_decodes: bool = False
    ) -> None:
        """Start without requests.

        Args:
            chunk_tokens: Most prompt tokens of a step.
            max_rows: Most requests with KV.
            kv_tokens: Most tokens with KV.
            mixes_decodes: Decodes run beside prompts, not after them.
        """
        assert min(chunk_tokens, max_rows, kv_tokens) > 0
        self._chunk_tokens = chunk_tokens
        self._max_rows = max_rows
        self._kv_tokens = kv_tokens
        self._mixes_decodes = mixes_decodes
        self._clock_s = 0.0
        self._requests: dict[str, _Request] = {}
        self._waiting: deque[_Request] = deque()
        """In order of arrival; the first may be partly computed."""

        self._decoding: list[_Request] = []
        self._gone: list[_Request] = []
        """Requests that have every token here that they ever get."""

    def __len__(self) -> int:
        return len(self._requests)

    def arrived(
        self, rid: str, arrival_s: float, prompt_tokens: int, cached_tokens: int = 0
    ) -> None:
        """Take in an online request, not before those that arrived earlier. O(1).

        Args:
            rid: Of no request that is in.
            arrival_s: When it arrived.
            prompt_tokens: Length of its prompt.
            cached_tokens: Of the prompt, those that the prefix cache has.
        """
        if rid in self._requests:
            self._drop_ended()  # One before it had this rid.
        assert rid not in self._requests
        cached_tokens = min(cached_tokens, prompt_tokens - 1)
        request = _Request(rid, arrival_s, prompt_tokens - cached_tokens, cached_tokens)
        self._requests[rid] = request
        self._waiting.append(request)

    def produced(self, rid: str, tokens: int = 1) -> None:
        """Note that so many more tokens of a request really came out. O(1)."""
        request = self._requests.get(rid)
        if request is not None:
            request.known_tokens += tokens

    def ended(self, rid: str) -> None:
        """Note that no more tokens of a request come. O(1)."""
        request = self._requests.get(rid)
        if request is not None and not request.has_ended:
            request.has_ended = True
            if request.has_all:
                self._gone.append(request)

    def given_up(self, rid: str) -> None:
        """Compute no more of a request: nor does the real engine. Its rid may come again. O(1)."""
        request = self._requests.pop(rid, None)
        if request is not None:
            self._gone.append(request)

    def advance(self, predict: Callable[[BatchStats], float], now_s: float) -> list[BaselineToken]:
        """Run the steps that began by ``now_s``, as far as their outcome is known.

        Args:
            predict: Seconds of a step.
            now_s: Every request that arrived by now is in.
        """
        tokens: list[BaselineToken] = []
        while self._step(predict, now_s, tokens):
            pass
        return tokens

    def _step(
        self, predict: Callable[[BatchStats], float], now_s: float, tokens: list[BaselineToken]
    ) -> bool:
        """Run one step; False when none can be run yet."""
        self._drop_ended()
        start_s = self._clock_s
        if not self._decoding:
            if not self._waiting:
                return False
            start_s = max(start_s, self._waiting[0].arrival_s)
        if start_s > now_s:
            return False
        chunks = self._chunks(start_s)
        if chunks is None:
            return False
        decodes = self._decoding if self._mixes_decodes or not chunks else []
        keys = len(decodes)
        for row in decodes:
            if row.generated_tokens >= row.known_tokens:
                return False
            keys += row.context_tokens
        stats = BatchStats(decode_requests=len(decodes), decode_context_tokens=keys)
        for request, count in chunks:
            stats = stats.with_prefill(count, request.context_tokens)
        if stats.is_empty:
            return False  # The first prompt waits for the memory of one that has yet to end.
        self._clock_s = end_s = start_s + predict(stats)
        new_token = tuple.__new__  # What BaselineToken() does, at half its cost.
        for row in decodes:
            row.context_tokens += 1
            row.generated_tokens = number = row.generated_tokens + 1
            tokens.append(new_token(BaselineToken, (row.rid, number, end_s)))
            if row.has_ended and number >= row.known_tokens:
                self._gone.append(row)
        for request, count in chunks:
            request.context_tokens += count
            request.prompt_left_tokens -= count
            if request.prompt_left_tokens == 0:
                self._waiting.popleft()
                request.generated_tokens = 1
                self._decoding.append(request)
                tokens.append(BaselineToken(request.rid, 1, end_s))
                if request.has_all:
                    self._gone.append(request)
        return True

    def _drop_ended(self) -> None:
        """Let go of requests with no token to come. O(1) while there is none."""
        if not self._gone:
            return
        requests = self._requests
        for request in self._gone:
            if requests.get(request.rid) is request:
                del requests[request.rid]
        self._gone.clear()
        self._waiting = deque(r for r in self._waiting if requests.get(r.rid) is r)
        self._decoding = [row for row in self._decoding if requests.get(row.rid) is row]

    def _chunks(self, start_s: float) -> list[tuple[_Request, int]] | None:
        """Return the prompts of a step that begins at ``start_s``, with the tokens of each.

        None while it is not known whether a row has ended whose place or memory one needs.
        """
        chunks: list[tuple[_Request, int]] = []
        if not self._waiting:
            return chunks
        budget = self._chunk_tokens
        rows = len(self._decoding)
        held = sum(row.context_tokens for row in self._decoding)
        for request in self._waiting:
            if budget == 0 or request.arrival_s > start_s:
                break
            needed = request.context_tokens + request.prompt_left_tokens
            is_full = held + needed > self._kv_tokens and (chunks or self._decoding)
            if is_full or rows == self._max_rows:
                return None if any(map(_may_have_ended, self._decoding)) else chunks
            count = min(budget, request.prompt_left_tokens)
            chunks.append((request, count))
            budget -= count
            rows += 1
            held += needed
        return chunks


def _may_have_ended(row: _Request) -> bool:
    return row.generated_tokens >= row.known_tokens and not row.has_ended


@dataclass(frozen=True, slots=True)
class EngineSize:
    """The limits of an engine: SGLang's usual chunk, and memory for all, unless told."""

    chunk_tokens: int = 8192
    """Most prompt tokens of a step."""

    max_rows: int = 1 << 20
    """Most requests with KV."""

    kv_tokens: int = 1 << 40
    """Most tokens with KV."""

    mixes_decodes: bool = False
    """Decodes run beside prompts, not after them."""

    micro_batches: int = 1
    """Under way at a time; more than one with pipeline parallelism."""
