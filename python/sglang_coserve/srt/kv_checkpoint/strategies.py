"""Strategies of checkpoints: when KV pages of offline requests are copied to host memory.

All ranks of a tensor-parallel engine decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final


@dataclass(frozen=True, slots=True)
class Eager:
    """Copies new full pages after each step (ConServe §4.4): many small copies, instant reclaim."""

    name: ClassVar[str] = "eager"
    saves_on_reclaim: ClassVar[bool] = False
    """Pages without a copy are copied before their device slots are freed, not dropped."""

    least_copy_tokens: int = 16
    """Fewest tokens of a request to copy at a time. With smaller pages (in SGLang often one token),
    each step would otherwise copy a page of every request, although a copy costs the scheduler the
    same for one token as for many."""

    step_tokens: int = 4096
    """Most tokens whose copy begins in one step; a prefix, saved whole, may exceed it."""

    most_in_flight_tokens: int = 16384
    """Most tokens whose copies are in flight at a time."""

    def to_copy(
        self, dirty_tokens: Mapping[str, int], page_tokens: int, in_flight_tokens: int
    ) -> dict[str, int]:
        """Return how many of the first dirty tokens of which requests to copy now. O(requests).

        Only whole pages are copied, and requests admitted last come first, as in retraction.
        ``dirty_tokens`` is what each offline request has to save, in order of admission; copies of
        ``in_flight_tokens`` are under way.
        """
        left = max(min(self.step_tokens, self.most_in_flight_tokens - in_flight_tokens), 0)
        copies = {}
        for rid, dirty in reversed(list(dirty_tokens.items())):
            if dirty < self.least_copy_tokens:
                continue
            tokens = min(dirty, left) // page_tokens * page_tokens
            if tokens:
                copies[rid] = tokens
                left -= tokens
        return copies


class Lazy:
    """Copies pages that are about to be reclaimed (BROS §V): fewest copies, but admission waits."""

    name: ClassVar[str] = "lazy"
    saves_on_reclaim: ClassVar[bool] = True

    def to_copy(self, *_unsaved: object) -> dict[str, int]:
        """Return no copies: a step begins none."""
        return {}


Strategy = Eager | Lazy

STRATEGIES: Final[Mapping[str, type[Strategy]]] = {"eager": Eager, "lazy": Lazy}
"""Strategies by their value of ``--kv-checkpoint``."""
