"""The KV of the no-interference baseline: the prefixes that online requests alone would cache."""

from __future__ import annotations

import math
from typing import Final, NamedTuple, Protocol

from sglang_coserve.core.control.recent_values import RecentValues
from sglang_coserve.core.offline_queue.request import TOKEN_BYTES
from sglang_coserve.core.prefix_tree import Node, PrefixTree

_WINDOW_S: Final = 900.0
"""Age in seconds after which a reuse of a prefix no longer counts."""

_UNKNOWN_S: Final = 300.0
"""Time in seconds from the first request until the shadow believes that nothing is reused."""

_LEAST_TOKENS: Final = 10_000
"""Number of reused tokens that count at any age: two or three conversations."""

_REUSED: Final = 0.9
"""Share of the reused tokens that come back within the lease."""

_OFFLINE_SHARE: Final = 1 / 16
"""Share of the KV for offline requests in any case: where conversations would fill all KV, batches
still go on. A single offline request may hold more. Simulated, H100, 40 chats whose prefixes grow
to 88% of the KV: with a sixteenth they find 95% of their tokens in the end, and offline work has
1.5% (prompts of 4,096, outputs of 128) and 5% (1,024 and 1,024) fewer tokens than with an eighth,
with which they find 86% and 72%."""

_UNKNOWN_SHARE: Final = 1 / 4
"""The same share while it is unknown whether prefixes are used again."""

_VOUCHES_FOR: Final = 16
"""Prompt tokens for which a reused token vouches. Prompts that begin with the same few tokens show
no conversations."""

_LEASE_MARGIN: Final = 1.25
"""Lease ÷ time within which ``_REUSED`` of the reused tokens came back. Turns of a conversation do
not come at equal intervals, and a prefix that is evicted just before its next turn was kept in
vain."""


class Protection(NamedTuple):
    """The KV that offline requests leave to the prefixes of recent online requests."""

    tokens: int
    """Tokens of these prefixes that no request holds."""

    offline_share: float
    """Share of all KV that offline requests may hold nevertheless."""


UNPROTECTED: Final = Protection(0, 1.0)


class ShadowRequest(Protocol):
    """A request in the baseline, as far as its KV goes; ``BaselineRequest`` is one."""

    prompt_left_tokens: int
    token_ids: bytes
    context_tokens: int
    lock: Node | None


class ShadowKv:
    """The KV of an engine that serves only the online requests of the real engine.

    Offline work evicts prefixes that conversations come back to. The baseline keeps them, so limits
    and bills account for the eviction. The shadow also learns how soon prefixes are used again,
    and so tells which of them deserve protection in the real engine.
    """

    def __init__(self, capacity_tokens: int, page_tokens: int, *, keeps_prefixes: bool) -> None:
        """Start empty. Without ``keeps_prefixes`` no request finds KV of another."""
        self._capacity_tokens = capacity_tokens
        self._keeps_prefixes = keeps_prefixes
        self._tree = PrefixTree(page_tokens)
        self._own_tokens = 0
        self._reuses = RecentValues(_WINDOW_S, at_least=_LEAST_TOKENS)
        """Seconds from the last use of a prefix to its next use, one value for each token."""

        self._first_s = math.inf
        """Time of the first request."""

        self._lease_s = 0.0
        self._num_new = 0
        self._unvouched_tokens = 0
        """Prompt tokens that began lately, without the tokens for which reused tokens vouch."""

        self.prompt_tokens = 0
        """Prompt tokens of all requests that began."""

        self.cached_tokens = 0
        """Prompt tokens that they found in the cache."""

    def lease_s(self, now_s: float) -> float:
        """Return for how many seconds a prefix should stay cached after its last use, while there
        is another to evict: the time within which nine tenths of the reused tokens come back.

        0 once prompts have filled all KV and little of it was reused. In the first minutes, when
        reuse is unknown, ``_UNKNOWN_S``. The first prefixes to come back are those that come back
        soon, so all prefixes stay until twice that time has passed.
        """
        if self._unvouched_tokens > self._capacity_tokens:
            return 0.0
        if self._is_unknown(now_s):
            return _UNKNOWN_S
        elapsed_s = now_s - self._first_s
        return max(self._lease_s, elapsed_s) if elapsed_s < 2 * self._lease_s else self._lease_s

    def protection(self, now_s: float) -> Protection:
        """Return the cached tokens whose lease has not ended, and the offline requests' share.

        O(seconds of the lease).
        """
        lease_s = self.lease_s(now_s)
        if not lease_s:
            return UNPROTECTED
        share = _UNKNOWN_SHARE if self._is_unknown(now_s) else _OFFLINE_SHARE
        return Protection(self._tree.idle_tokens(now_s - lease_s), share)

    def _is_unknown(self, now_s: float) -> bool:
        is_rare = _VOUCHES_FOR * self._reuses.count <= self.prompt_tokens
        return is_rare and now_s - self._first_s < _UNKNOWN_S

    def flush(self) -> None:
        """Evict every prefix that no request holds, as the engine does on request."""
        self._tree.evict(self._tree.evictable_tokens)

    def begin(self, request: ShadowRequest, now_s: float, *, must_fit: bool) -> bool:
        """Give a request its cached prefix, and room for the rest of its prompt.

        Returns False, and changes nothing, if there is too little room; without ``must_fit`` the
        request begins all the same. O(edges of the prefix).
        """
        self._first_s = min(self._first_s, now_s)
        prompt_tokens = request.prompt_left_tokens
        limit_tokens = prompt_tokens - 1 if self._keeps_prefixes else 0
        # The logits of the last token are needed, so it is always computed.
        lock = self._tree.lock(request.token_ids, min(limit_tokens, _length(request)))
        left_tokens = prompt_tokens - lock.depth_tokens
        if must_fit and left_tokens > self._free_tokens:
            self._tree.unlock(lock, 0.0)
            return False
        vouched_tokens = _VOUCHES_FOR * self._learn(lock, now_s)
        unvouched_tokens = self._unvouched_tokens + prompt_tokens - vouched_tokens
        self._unvouched_tokens = max(unvouched_tokens, 0)
        request.lock = lock
        request.context_tokens = lock.depth_tokens
        request.prompt_left_tokens = left_tokens
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += lock.depth_tokens
        self._own(left_tokens)
        return True

    def generated(self, count: int) -> None:
        """Take room for one more token of each of ``count`` requests."""
        self._own(count)

    def share(self, request: ShadowRequest) -> None:
        """Let others find the computed tokens of a request."""
        if request.lock is None or not self._keeps_prefixes:
            return
        length_tokens = self._tree.aligned(min(request.context_tokens, _length(request)))
        before_tokens = request.lock.depth_tokens
        if length_tokens > before_tokens:
            request.lock = self._tree.extend(request.lock, request.token_ids, length_tokens)
            self._own(before_tokens - length_tokens)

    def release(self, request: ShadowRequest, now_s: float) -> None:
        """Free the KV of a request; what others can find stays cached."""
        if request.lock is None:
            return
        self.share(request)
        own_tokens = request.context_tokens + request.prompt_left_tokens - request.lock.depth_tokens
        self._tree.unlock(request.lock, now_s)
        self._own(-own_tokens)
        request.lock = None

    @property
    def _free_tokens(self) -> int:
        locked_tokens = self._tree.total_tokens - self._tree.evictable_tokens
        return self._capacity_tokens - self._own_tokens - locked_tokens

    def _own(self, tokens: int) -> None:
        """Move ``tokens`` into the KV of single requests; a negative number out of it."""
        self._own_tokens += tokens
        excess_tokens = self._own_tokens + self._tree.total_tokens - self._capacity_tokens
        if excess_tokens > 0:
            self._tree.evict(excess_tokens)

    def _learn(self, lock: Node, now_s: float) -> int:
        """Record how long ago the prefix that ends at ``lock`` was used, if it was idle.

        Returns the tokens that were idle.
        """
        num_reused = 0
        node: Node | None = lock
        while node is not None and node.edge_tokens and node.locks == 1:
            self._reuses.add(now_s - node.rank, now_s, node.edge_tokens)
            num_reused += node.edge_tokens
            node = node.parent
        self._num_new += num_reused
        if self._num_new > (1 - _REUSED) * self._reuses.count:
            self._num_new = 0
            self._lease_s = _LEASE_MARGIN * self._reuses.quantile(_REUSED)
        return num_reused


def _length(request: ShadowRequest) -> int:
    """Return the number of known token ids of a request."""
    return len(request.token_ids) // TOKEN_BYTES
