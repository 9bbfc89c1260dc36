"""Keeps the core's data on the requests in the engine, and gives it to snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from sglang_coserve.core.request import Ending, RequestClass, RequestState
from sglang_coserve.core.snapshot import Request, RequestInfo
from sglang_coserve.srt.compat import (
    cached_prefix_tokens,
    computed_tokens,
    holds_kv,
    prefix_tokens,
)
from sglang_coserve.srt.marks.offline_marks import expected_tokens_of, job_of, user_of
from sglang_coserve.srt.marks.request_marks import is_offline, targets_of
from sglang_coserve.srt.steps.request_groups import has_plain_state

__all__ = ["ClassTotals", "RequestLedger", "ending_of"]

Req = Any
ScheduleBatch = Any

_MATCHED_WAITING = 8
"""Number of waiting online requests whose cached prefix is looked up in each round; the others
count as not cached."""


@dataclass(slots=True)
class ClassTotals:
    """Sums over the requests of a class."""

    requests: int = 0
    tokens: int = 0
    """Their lengths: prompts and expected outputs."""

    def add(self, requests: int, tokens: int) -> None:
        """Add so many of both; negative for requests that leave."""
        self.requests += requests
        self.tokens += tokens


class RequestLedger:
    """The live requests by rid, with their ``RequestInfo`` and the time of their last token."""

    def __init__(self, tree_cache: Any) -> None:
        self._tree_cache = tree_cache
        self._infos: dict[str, RequestInfo] = {}
        self._reqs: dict[str, Req] = {}
        self._online: dict[str, Req] = {}
        self._last_token_s: dict[str, float] = {}
        self._begun: dict[str, Req] = {}
        """Those that were part of a batch; the others hold no KV."""

        self._lengths: dict[str, int] = {}
        self._totals = {request_class: ClassTotals() for request_class in RequestClass}

    def __len__(self) -> int:
        return len(self._infos)

    def __contains__(self, rid: str) -> bool:
        return rid in self._infos

    def __getitem__(self, rid: str) -> RequestInfo:
        return self._infos[rid]

    def get(self, rid: str) -> RequestInfo | None:
        """Return what is known of a request; None if it is not in."""
        return self._infos.get(rid)

    def has(self, req: Req) -> bool:
        """Return whether this very request is in, not just one with its rid."""
        return self._reqs.get(req.rid) is req

    def request(self, rid: str) -> Req | None:
        """Return the request with this rid; None if it is not in."""
        return self._reqs.get(rid)

    def namesake(self, req: Req) -> Req | None:
        """Return another request with the same rid, if there is one."""
        known = self._reqs.get(req.rid)
        return None if known is req else known

    def add(self, req: Req, arrival_s: float) -> RequestInfo:
        """Add a request that arrived at ``arrival_s``; one that is in already is not changed."""
        known = self._infos.get(req.rid)
        if known is not None:
            return known
        ttft_target_s, tpot_target_s = targets_of(req)
        self._reqs[req.rid] = req
        info = self._infos[req.rid] = RequestInfo(
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
            user=user_of(req),
        )
        if info.is_online:
            self._online[req.rid] = req
        self._lengths[req.rid] = info.prompt_tokens + _output_tokens(req, info)
        self._totals[info.request_class].add(1, self._lengths[req.rid])
        return info

    def launched(self, batch: ScheduleBatch | None) -> None:
        """Record the batch of a scheduling round. O(requests) if it has prompts, else O(1)."""
        if batch and batch.forward_mode.is_extend():
            self._begun |= {req.rid: req for req in batch.reqs if req.rid in self._reqs}

    def has_begun(self, rid: str) -> bool:
        """Return whether a request has been part of a batch."""
        return rid in self._begun

    def length(self, rid: str) -> int:
        """Return the length of a request in tokens: its prompt and its expected output."""
        return self._lengths[rid]

    def totals(self, request_class: RequestClass) -> ClassTotals:
        """Return the number and the length of a class's requests. O(1)."""
        return self._totals[request_class]

    def produced(self, rid: str, now_s: float) -> None:
        """Record the time of a token."""
        self._last_token_s[rid] = now_s

    def last_token_s(self, rid: str) -> float | None:
        """Return the time of a request's last token; None before the first."""
        return self._last_token_s.get(rid)

    def online_reqs(self) -> list[Req]:
        """Return the online requests."""
        return list(self._online.values())

    def in_order_of_arrival(self) -> Iterator[RequestInfo]:
        """Yield all requests; to be used up, or left, before one comes or goes."""
        yield from self._infos.values()

    def reqs(self) -> list[Req]:
        """Return all requests."""
        return list(self._reqs.values())

    def with_kv(self) -> tuple[list[Req], list[Req]]:
        """Return the online and the offline requests that hold KV. O(those that have begun)."""
        online: list[Req] = []
        offline: list[Req] = []
        for rid, req in self._begun.items():
            if holds_kv(req):
                (online if self._infos[rid].is_online else offline).append(req)
        return online, offline

    def forget(self, rid: str) -> None:
        """Remove a request, if it is in."""
        self._last_token_s.pop(rid, None)
        info = self._infos.pop(rid, None)
        if info is not None:
            self._totals[info.request_class].add(-1, -self._lengths.pop(rid))
        self._begun.pop(rid, None)
        self._online.pop(rid, None)
        self._reqs.pop(rid, None)

    def decoding_requests(
        self, reqs: Iterable[Req], state: RequestState, now_s: float
    ) -> list[Request]:
        """Return those that generate or are paused as a snapshot has them at ``now_s``."""
        infos, last_token_s = self._infos, self._last_token_s.get
        requests = []
        for req in reqs:
            rid = req.rid
            info = infos[rid]
            # Includes a token in flight under overlap scheduling, as its KV is allocated already.
            computed = computed_tokens(req)
            generated = computed + 1 - info.prompt_tokens
            is_in_flight = generated > len(req.output_ids)
            last_s = now_s if is_in_flight else last_token_s(rid)
            requests.append(Request(info, state, generated, computed, 0, last_s))
        return requests

    def prefilling_request(self, req: Req, state: RequestState) -> Request:
        """Return one whose prompt is partly computed as a snapshot has it."""
        computed = prefix_tokens(req)
        last_s = self._last_token_s.get(req.rid)
        return Request(self._infos[req.rid], state, len(req.output_ids), computed, 0, last_s)

    def waiting_requests(self, reqs: Iterable[Req]) -> Sequence[Request]:
        """Return those that wait as a snapshot has them, the first with their cached prefix.

        Each is looked at when it is first asked for, as a plan asks for few of many.
        """
        return _Waiting(reqs, self._waiting_request)

    def _waiting_request(self, place: int, req: Req) -> Request:
        cached = self.match_prefix(req) if place < _MATCHED_WAITING else 0
        last_s = self._last_token_s.get(req.rid)
        info, generated = self._infos[req.rid], len(req.output_ids)
        return Request(info, RequestState.WAITING, generated, 0, cached, last_s)

    def match_prefix(self, req: Req) -> int:
        """Return how many leading tokens of a waiting request the radix cache holds."""
        return cached_prefix_tokens(self._tree_cache, req)


class _Waiting(Sequence[Request]):
    def __init__(self, reqs: Iterable[Req], describe: Callable[[int, Req], Request]) -> None:
        self._reqs = list(reqs)
        self._describe = describe
        self._known: list[Request] = []
        """The first ones, as they were described."""

    def __len__(self) -> int:
        return len(self._reqs)

    @overload
    def __getitem__(self, place: int) -> Request: ...

    @overload
    def __getitem__(self, place: slice) -> list[Request]: ...

    def __getitem__(self, place: int | slice) -> Request | list[Request]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        known = self._known
        while len(known) <= place:
            known.append(self._describe(len(known), self._reqs[len(known)]))
        return known[place]


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
