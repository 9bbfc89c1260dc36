"""The register of all requests in the engine, of both classes, from arrival to end."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from sglang_coserve.core.offline_queue import PackedTokens, pack_tokens
from sglang_coserve.core.request import Ending, RequestClass
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.srt import compat
from sglang_coserve.srt.compat import holds_kv
from sglang_coserve.srt.marks.offline_marks import expected_tokens_of, job_of
from sglang_coserve.srt.marks.request_marks import is_offline, targets_of
from sglang_coserve.srt.steps.paused_requests import has_plain_state
from sglang_coserve.srt.steps.step_record import Reception

Req = Any

_MOST_LEFT: Final = 1 << 12
"""Most requests kept for ``take_left``: an idle engine, whose requests are all aborted while they
wait, may have none who takes them."""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """What is known of a request in the engine."""

    req: Req
    info: RequestInfo
    reception: Reception
    is_online: bool
    length_tokens: int
    """Its prompt and its expected output."""

    first_token_s: float | None = None
    """Time of its first token in this engine."""

    last_token_s: float | None = None
    """Time of its last token."""

    last_result_s: float | None = None
    """Time of its last token by the clock of this rank, for observers alone."""

    output_tokens: int = 0
    """Length of its output, by the last results."""

    prefilled_tokens: int = 0
    """Most tokens of the prompt that have been computed, until the prompt was whole."""

    was_whole: bool = False
    """True once all tokens but the last have been computed."""

    def note_prefill(self, context_tokens: int, tokens: int) -> int:
        """Record that ``tokens`` tokens behind ``context_tokens`` were computed.

        Return how many of them had been computed before: the recompute tax of retraction. Tokens
        that were found in the cache count as computed.
        """
        if not tokens:
            return 0
        end = context_tokens + tokens
        is_whole = end >= len(self.req.origin_input_ids) + len(self.req.output_ids) - 1
        # The last token of a whole request was not computed before.
        before = end - is_whole if self.was_whole else self.prefilled_tokens
        self.was_whole |= is_whole
        self.prefilled_tokens = max(self.prefilled_tokens, end)
        return max(0, min(before, end) - context_tokens)


def packed_tokens(req: Req) -> PackedTokens:
    """Return the prompt and output of a request, packed.

    Two requests have a common prefix only if SGLang's radix cache lets them share it: the first
    token also stands for the namespace of the request. O(tokens).
    """
    token_ids = [*req.origin_input_ids, *req.output_ids]
    namespace = compat.prefix_namespace(req)
    if namespace is not None and token_ids:
        digest = sha256(repr((namespace, token_ids[0])).encode()).digest()
        token_ids[0] = int.from_bytes(digest[:7], "big")
    return pack_tokens(token_ids)


class EngineRequests:
    """The live requests by rid."""

    def __init__(self) -> None:
        self._live: dict[str, LiveRequest] = {}
        self.by_rid: Final[Mapping[str, LiveRequest]] = self._live
        """The requests; callers must not change the mapping."""

        self._of_class = {each: dict[str, LiveRequest]() for each in RequestClass}
        self._begun: dict[str, LiveRequest] = {}
        """Those that were part of a batch; the others hold no KV."""

        self._tokens = Counter[RequestClass]()
        self._left: deque[RequestInfo] = deque(maxlen=_MOST_LEFT)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._live.values())

    def __contains__(self, rid: str) -> bool:
        return rid in self._live

    def __getitem__(self, rid: str) -> LiveRequest:
        return self._live[rid]

    def get(self, rid: str) -> LiveRequest | None:
        """Return what is known of a request; None if it is not in."""
        return self._live.get(rid)

    def live(self, req: Req) -> LiveRequest | None:
        """Return what is known of this very request, not of another one with its rid."""
        live = self._live.get(req.rid)
        return live if live is not None and live.req is req else None

    def namesake(self, req: Req) -> Req | None:
        """Return another request with the same rid, if there is one."""
        live = self._live.get(req.rid)
        return None if live is None or live.req is req else live.req

    def add(self, req: Req, arrival_s: float, reception: Reception | None = None) -> RequestInfo:
        """Add a request that arrived at ``arrival_s``; a request that is in already is not changed.

        By default, ``reception`` says that the request was queued as it arrived.
        """
        known = self._live.get(req.rid)
        if known is not None:
            return known.info
        ttft_target_s, tpot_target_s = targets_of(req)
        info = RequestInfo(
            rid=req.rid,
            # One that failed validation is answered by SGLang, like an online one.
            request_class=(
                RequestClass.OFFLINE
                if is_offline(req) and req.to_finish is None
                else RequestClass.ONLINE
            ),
            prompt_tokens=len(req.origin_input_ids),
            max_new_tokens=req.sampling_params.max_new_tokens,
            arrival_s=arrival_s,
            ttft_target_s=ttft_target_s,
            tpot_target_s=tpot_target_s,
            job=job_of(req),
            can_pause=has_plain_state(req),
        )
        length_tokens = info.prompt_tokens + _output_tokens(req, info)
        reception = reception or Reception(None, None, arrival_s)
        live = LiveRequest(req, info, reception, info.is_online, length_tokens)
        self._live[req.rid] = self._of_class[info.request_class][req.rid] = live
        self._tokens[info.request_class] += length_tokens
        return info

    def note_prompt(self, req: Req) -> Reception | None:
        """Record that a prompt is in a batch; return the way of the request to the batch if the
        batch is its first, else None."""
        live = self.live(req)
        if live is None:
            return None
        live.output_tokens = len(req.output_ids)  # SGLang may have emptied the output.
        is_new = req.rid not in self._begun
        self._begun[req.rid] = live
        return live.reception if is_new else None

    def has_begun(self, rid: str) -> bool:
        """Return whether a request has been part of a batch."""
        return rid in self._begun

    def of_class(self, request_class: RequestClass) -> Collection[LiveRequest]:
        """Return the requests of a class in order of arrival, as they are when looked at. O(1)."""
        return self._of_class[request_class].values()

    def length_tokens(self, request_class: RequestClass) -> int:
        """Return the sum of the lengths of a class's requests. O(1)."""
        return self._tokens[request_class]

    def with_kv(self) -> tuple[list[Req], list[Req]]:
        """Return the online and the offline requests that hold KV. O(those that have begun)."""
        online: list[Req] = []
        offline: list[Req] = []
        for live in self._begun.values():
            if holds_kv(live.req):
                (online if live.is_online else offline).append(live.req)
        return online, offline

    def forget(self, rid: str) -> None:
        """Remove a request, if it is in."""
        live = self._live.pop(rid, None)
        if live is not None:
            del self._of_class[live.info.request_class][rid]
            self._tokens[live.info.request_class] -= live.length_tokens
            self._left.append(live.info)
        self._begun.pop(rid, None)

    def take_left(self) -> tuple[RequestInfo, ...]:
        """Return the requests that were removed since the last call."""
        left = tuple(self._left)
        self._left.clear()
        return left


def _output_tokens(req: Req, info: RequestInfo) -> int:
    expected = expected_tokens_of(req)
    return info.max_new_tokens if expected is None else min(expected, info.max_new_tokens)


def ending_of(reason: Mapping[str, Any] | None) -> Ending:
    """Return how a request ended for which SGLang gives this reason, as JSON.

    What a client takes back has no reason, or one without a status; what the server could not serve
    has a status from 500 on.
    """
    if reason is not None and reason["type"] != "abort":
        return Ending.COMPLETE
    status = reason.get("status_code") if reason is not None else None
    return Ending.ABORTED if status is None or status < 500 else Ending.REFUSED
