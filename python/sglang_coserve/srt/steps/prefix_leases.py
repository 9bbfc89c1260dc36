"""Keeps the prefixes of online requests in SGLang's radix cache for longer than others.

SGLang's eviction policy ``priority`` evicts the prefixes with the lowest priority first, and a
prefix keeps the highest priority with which it was inserted. The priority given here is a time: the
time of the last use, and for online requests the lease in addition (``ShadowKv.lease_s``). So the
least recently used prefix is evicted first, and an online prefix counts as used one lease later.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from sglang_coserve.srt import compat

Req = Any

EVICTION_POLICY: Final = "priority"
"""Value of SGLang's ``--radix-eviction-policy`` under which leases act."""


class PrefixLeases:
    """Gives each insertion into the radix cache its priority. All ranks give the same."""

    def __init__(self, tree_cache: Any, is_online: Callable[[Req], bool]) -> None:
        """Replace the methods of ``tree_cache`` that insert the tokens of a request."""
        self._is_online = is_online
        self._now_s = 0.0
        self._lease_s = 0.0
        for name in compat.INSERTING_METHODS:
            # A cache without them (disabled, or of sliding windows alone) keeps its own order.
            if hasattr(tree_cache, name):
                setattr(tree_cache, name, self._ranked(getattr(tree_cache, name)))

    def begin_pass(self, now_s: float, lease_s: float) -> None:
        """Take the time of a scheduling pass, and the lease of online prefixes, in seconds."""
        self._now_s, self._lease_s = now_s, lease_s

    def _ranked(self, insert: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(insert)
        def ranked(req: Req, *args: Any, **kwargs: Any) -> Any:
            # SGLang reads the priority of the request, by which it also orders its queue.
            own, req.priority = req.priority, self._rank(req)
            try:
                return insert(req, *args, **kwargs)
            finally:
                req.priority = own

        return ranked

    def _rank(self, req: Req) -> int:
        lease_s = self._lease_s if self._is_online(req) else 0.0
        return math.floor(self._now_s + lease_s)
