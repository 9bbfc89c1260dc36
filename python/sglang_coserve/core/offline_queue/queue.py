"""The queue of offline requests, ordered by deadline, length, shared prefix and age."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Final

from sortedcontainers import SortedKeyList

from sglang_coserve.core.offline_queue.prefix_trie import PrefixTrie, TrieLeaf
from sglang_coserve.core.offline_queue.request import (
    TOKEN_BYTES,
    PackedTokens,
    QueuedRequest,
    common_prefix_bytes,
)
from sglang_coserve.core.ranges import NOT_NEGATIVE, SHARE, check_ranges
from sglang_coserve.errors import RequestError

_EQUAL: Final = 1e-6
"""Relative rounding error allowed when sums are compared."""


@dataclass(frozen=True, slots=True)
class OfflineQueueConfig:
    """How the queue weighs prefix sharing, age, deadlines and length.

    Raises:
        ConfigError: a value is out of range; the message names the field.
    """

    utility_ratio: Annotated[float, SHARE] = 0.95
    """Probability that a pick follows the prefix trie rather than age (HyGen A.3's u):
    1 shares prefixes as much as possible, 0 serves in order of arrival."""

    max_overtakes: Annotated[int | None, NOT_NEGATIVE] = 64
    """Most consecutive picks that may pass over the oldest request; ``None``: no limit."""

    deadline_slack_s: Annotated[float, NOT_NEGATIVE] = 600.0
    """A request goes before those without time pressure once less than this is left
    until its latest start."""

    longest_first: bool = True
    """Whether a request that alone would run longer than all waiting work takes, spread over the
    running requests, goes before those without time pressure. Simulated on an H100, 300 requests
    with outputs of 50 to 300 tokens: ended after 14.0 s, without the rule 15.0 s; with 4,000 tokens
    for every fiftieth, 44.3 and 50.4 s."""

    seed: int = 0
    """Seed of the draws that the utility ratio needs."""

    def __post_init__(self) -> None:
        check_ranges(self, "offline queue: {}".format)


class OfflineQueue:
    """Holds the waiting offline requests, and the positions of the running ones.

    A request is added and waits. It is taken and runs. A retracted request is restored, and waits
    again at its position. A request that ends, for any reason, is removed. Methods raise
    ``RequestError`` for a rid that is not in the queue, unless they are said to ignore it.

    The first rule that applies picks the next request:

    1. Starvation: picks the oldest request, once ``max_overtakes`` picks in a row have passed over
       the oldest one.
    2. Deadlines: picks the request with the earliest latest start (its deadline less its predicted
       run time), if this start is less than ``deadline_slack_s`` away. A latest start in the past
       counts for nothing, since the deadline is predicted to be missed. A request that passes over
       the oldest one by a latest start earlier by more than ``deadline_slack_s`` leaves the next
       pick to the other rules, so that short deadlines take half of the picks at most.
    3. Length, with ``longest_first``: picks the request that would run longest, if it would run
       longer than all waiting work takes, spread over the running requests, and longer than the
       mean. Otherwise it would run on alone at the end.
    4. Prefix or age (HyGen A.3): with probability ``utility_ratio`` picks the request that shares
       the longest prefix with the one taken last, else the oldest. In HyGen, picking the oldest
       does not move the position in the trie's order. Here the order goes on from any request
       taken, because its prefix is in the cache. The order goes on from another request if other
       requests have left more of its prompt in the cache (``cached``) than the next request shares
       with the last.

    The oldest request is the one with the earliest arrival; ties go by the order of
    ``add``. Each taken request uses one random draw, whichever rule decided, so the same seed
    and calls give the same picks.

    **No request starves.** Let r be waiting, K = ``max_overtakes``, and a the number of
    requests older than r: those waiting when r starts to wait, plus every
    later ``add`` or ``restore`` of one while r waits. Then r is among the next
    (a + 1)·(K + 1) picks, whatever else arrives. Proof: by rule 1, at least one of
    any K + 1 consecutive picks takes the request that is the oldest
    at that time. While r waits, that is r itself or one of the a; so it is r by
    the (a + 1)th such pick. The bound counts picks: a caller
    that skips the first candidate for lack of room gets it first again the next time, or once
    another one is taken (``no_room``).

    No method takes time proportional to the number of requests.
    """

    def __init__(self, config: OfflineQueueConfig) -> None:
        self._config = config
        self._leaves: dict[str, TrieLeaf] = {}
        self._trie = PrefixTrie()
        # Ties go by the order of ``add``. In a list what a key is made of must not change.
        self._by_age = SortedKeyList(key=lambda leaf: (leaf.request.arrival_s, leaf.number))
        self._by_latest_start = SortedKeyList(
            key=lambda leaf: (leaf.request.latest_start_s, leaf.number)
        )
        self._longest_first = SortedKeyList(
            key=lambda leaf: (-leaf.request.estimated_service_s, leaf.number)
        )
        self._service_s = 0.0
        """Sum of ``estimated_service_s`` of the waiting requests."""

        self._last_tokens = b""
        self._random = random.Random(config.seed)
        self._draws: deque[float] = deque()
        self._num_overtakes = 0
        self._is_urgent = False
        """The request taken last went before others for its deadline."""

        self._no_room: set[TrieLeaf] = set()
        self._num_added = 0
        self._num_changes = 0

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._by_age)

    def __contains__(self, rid: str) -> bool:
        """Return whether the request with this id waits."""
        leaf = self._leaves.get(rid)
        return leaf is not None and leaf.is_waiting

    @property
    def num_running(self) -> int:
        """Number of requests that were taken and neither restored nor removed."""
        return len(self._leaves) - len(self._by_age)

    def is_running(self, rid: str) -> bool:
        """Return whether a request was taken and neither restored nor removed."""
        leaf = self._leaves.get(rid)
        return leaf is not None and not leaf.is_waiting

    def running(self, rid: str) -> QueuedRequest:
        """Return a running request as it was when it was taken."""
        leaf = self._leaf(rid)
        assert not leaf.is_waiting, f"{rid!r} waits"
        return leaf.request

    def add(self, request: QueuedRequest) -> None:
        """Add a new waiting request. O(prompt tokens + log n).

        Raises:
            RequestError: a request with this rid waits or runs already.
        """
        if request.rid in self._leaves:
            raise RequestError(
                f"offline request {request.rid!r} is already queued or running: "
                "give every request an id of its own"
            )
        leaf = TrieLeaf(request, self._num_added)
        self._num_added += 1
        self._leaves[request.rid] = leaf
        self._trie.insert(leaf)
        self._add_waiting(leaf)

    def candidates(self, now_s: float) -> Iterator[QueuedRequest]:
        """Yield the waiting requests in the order in which they should be taken.

        This does not take them: call ``take`` for those that the batch has room for. The queue
        must not change while the iterator is in use. Each candidate costs O(nodes
        above it in the trie); the first one by prefix after one by another rule
        also skips those already yielded.
        """
        in_order = (leaf for leaf in self._in_order(now_s) if leaf not in self._no_room)
        return (leaf.request for leaf in in_order)

    def peek(self, now_s: float) -> QueuedRequest | None:
        """Return the first candidate, or ``None`` if there is none."""
        return next(self.candidates(now_s), None)

    def take(self, rid: str) -> QueuedRequest:
        """Mark a waiting request as running and return it. O(prompt tokens + log n)."""
        leaf = self._leaf(rid)
        assert leaf.is_waiting, f"{rid!r} is taken while it runs"
        oldest = self._by_age[0]
        self._num_overtakes = 0 if leaf is oldest else self._num_overtakes + 1
        self._is_urgent = self._is_much_earlier(leaf, oldest)
        self._draw(0)
        self._draws.popleft()
        self._last_tokens = leaf.tokens
        self._trie.suspend(leaf)
        self._no_room.clear()
        self._remove_waiting(leaf)
        return leaf.request

    def restore(self, request: QueuedRequest) -> None:
        """Mark a retracted request as waiting, with its progress. O(prompt tokens + log n).

        ``request`` is what ``running`` returns, with more tokens and the time that it still needs.
        """
        leaf, rid = self._leaf(request.rid), request.rid
        assert not leaf.is_waiting, f"{rid!r} is restored while it waits"
        assert request.token_ids is leaf.request.token_ids, f"{rid!r} has another prompt"
        more = request.num_generated_tokens - leaf.request.num_generated_tokens
        assert more >= 0, f"{rid!r} lost progress"
        leaf.request = request
        self._trie.resume(leaf)
        self._add_waiting(leaf)

    def nearest(self, token_ids: PackedTokens) -> QueuedRequest | None:
        """Return the waiting request with the longest common prefix, or None if none waits.

        O(prompt tokens).
        """
        leaf = next(self._trie.near(token_ids), None)
        return None if leaf is None else leaf.request

    def opens_branch(self, rid: str) -> bool:
        """Return whether no request shares a longer prefix with this one than that taken last.

        Only then may the KV cache hold more of its prompt than the trie knows. O(prompt tokens).
        """
        leaf = self._leaf(rid)
        assert leaf.parent is not None
        return leaf.parent.depth_bytes <= _common_bytes(leaf.tokens, self._last_tokens)

    def cached(self, rid: str, cached_tokens: int) -> None:
        """Record how much of a request's prompt the KV cache holds, left by other requests.

        Requests with that prefix then come first, unless the next request shares a prefix of at
        least that length with the last. Ignored if the request does not wait. O(prompt tokens).
        """
        leaf = self._leaves.get(rid)
        if leaf is None or not leaf.is_waiting:
            return
        cached_bytes = cached_tokens * TOKEN_BYTES
        follower = next(self._trie.near(self._last_tokens))
        if cached_bytes > _common_bytes(follower.tokens, self._last_tokens):
            self._last_tokens = leaf.tokens
        self._trie.promote(leaf, cached_bytes)
        self._num_changes += 1

    def no_room(self, rid: str) -> None:
        """Exclude a request from the candidates, because the engine has no room for it.

        Until a request is taken, or all waiting requests are excluded. Ignored if the request
        does not wait. O(1).
        """
        leaf = self._leaves.get(rid)
        if leaf is None or not leaf.is_waiting:
            return
        self._no_room.add(leaf)
        self._num_changes += 1
        self._leave_a_candidate()

    def remove(self, rid: str) -> QueuedRequest:
        """Remove a request that has finished, failed or was cancelled, running or waiting.

        O(prompt tokens + log n).
        """
        leaf = self._leaf(rid)
        if leaf.is_waiting:
            self._remove_waiting(leaf)
        self._trie.remove(leaf)
        del self._leaves[rid]
        return leaf.request

    def _in_order(self, now_s: float) -> Iterator[TrieLeaf]:
        num_changes = self._num_changes
        num_overtakes, most_overtakes = self._num_overtakes, self._config.max_overtakes
        yielded: set[TrieLeaf] = set()
        by_age = _Remaining(self._by_age, yielded)
        in_time = self._by_latest_start.irange_key(min_key=(now_s, 0))
        by_latest_start = _Remaining(in_time, yielded)
        is_urgent = self._is_urgent
        longest_first = _Remaining(self._longest_first, yielded)
        service_s = self._service_s
        by_prefix: _Remaining | None = None
        last_tokens = self._last_tokens
        while (oldest := by_age.first) is not None:
            draw = self._draw(len(yielded))
            if most_overtakes is not None and num_overtakes >= most_overtakes:
                leaf = oldest
            elif (
                not is_urgent
                and (urgent := by_latest_start.first)
                and self._is_at_risk(urgent, now_s)
            ):
                leaf = urgent
            elif (longest := longest_first.first) and self._would_end_last(
                longest, service_s, len(yielded)
            ):
                leaf = longest
            elif draw < self._config.utility_ratio:
                by_prefix = by_prefix or _Remaining(self._trie.near(last_tokens), yielded)
                nearest = by_prefix.first
                assert nearest is not None
                leaf = nearest
            else:
                leaf = oldest
            if by_prefix and leaf is not by_prefix.first:
                by_prefix = None
            last_tokens = leaf.tokens
            num_overtakes = 0 if leaf is oldest else num_overtakes + 1
            is_urgent = self._is_much_earlier(leaf, oldest)
            service_s -= leaf.request.estimated_service_s
            yielded.add(leaf)
            yield leaf
            assert num_changes == self._num_changes, "the queue changed under its candidates"

    def _is_at_risk(self, leaf: TrieLeaf, now_s: float) -> bool:
        latest_start_s = leaf.request.latest_start_s
        assert latest_start_s is not None
        return latest_start_s - now_s < self._config.deadline_slack_s

    def _is_much_earlier(self, leaf: TrieLeaf, oldest: TrieLeaf) -> bool:
        """Return whether a request has a latest start far before the oldest one's."""
        own_s, oldest_s = leaf.request.latest_start_s, oldest.request.latest_start_s
        if own_s is None:
            return False
        return oldest_s is None or oldest_s - own_s > self._config.deadline_slack_s

    def _would_end_last(self, longest: TrieLeaf, service_s: float, num_yielded: int) -> bool:
        """Return whether the longest request must start now, or it would end last, alone.

        ``service_s`` is the predicted time of all waiting requests, including this one, without
        those already yielded, which count as running.
        """
        if not self._config.longest_first:
            return False
        own_s = longest.request.estimated_service_s
        num_waiting = len(self._by_age) - num_yielded
        num_requests = max(1, self.num_running + num_yielded)
        return own_s * num_requests >= service_s and own_s * num_waiting > service_s * (1 + _EQUAL)

    def _draw(self, index: int) -> float:
        while len(self._draws) <= index:
            self._draws.append(self._random.random())
        return self._draws[index]

    def _add_waiting(self, leaf: TrieLeaf) -> None:
        self._by_age.add(leaf)
        self._longest_first.add(leaf)
        self._service_s += leaf.request.estimated_service_s
        if leaf.request.deadline_s is not None:
            self._by_latest_start.add(leaf)
        self._num_changes += 1

    def _remove_waiting(self, leaf: TrieLeaf) -> None:
        self._by_age.remove(leaf)
        self._longest_first.remove(leaf)
        # Reset to 0 when the queue is empty, so that rounding errors do not accumulate.
        self._service_s -= (
            leaf.request.estimated_service_s if len(self._by_age) else self._service_s
        )
        if leaf.request.deadline_s is not None:
            self._by_latest_start.remove(leaf)
        self._no_room.discard(leaf)
        self._leave_a_candidate()
        self._num_changes += 1

    def _leave_a_candidate(self) -> None:
        if len(self._no_room) == len(self._by_age):
            self._no_room.clear()

    def _leaf(self, rid: str) -> TrieLeaf:
        leaf = self._leaves.get(rid)
        if leaf is None:
            raise RequestError(
                f"no offline request {rid!r} is queued or running: "
                "it never came, has finished or was cancelled"
            )
        return leaf


class _Remaining:
    """An iterator over leaves that skips those already yielded."""

    __slots__ = ("_first", "_leaves", "_yielded")

    def __init__(self, leaves: Iterable[TrieLeaf], yielded: set[TrieLeaf]) -> None:
        self._leaves = iter(leaves)
        self._yielded = yielded
        self._first = next(self._leaves, None)

    @property
    def first(self) -> TrieLeaf | None:
        while self._first in self._yielded:
            self._first = next(self._leaves, None)
        return self._first


def _common_bytes(a: bytes, b: bytes) -> int:
    return common_prefix_bytes(a, b, 0, min(len(a), len(b)))
