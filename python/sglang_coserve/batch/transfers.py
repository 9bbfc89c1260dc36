"""How many uploads, or downloads, are under way at the same time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from sglang_coserve.batch.errors import TooManyError

__all__ = ["Transfers"]


class Transfers:
    """A place for each transfer; an owner who holds many leaves enough to the others."""

    def __init__(self, kind: str, max_all: int, max_per_owner: int) -> None:
        self._kind = kind
        self._max_all = max_all
        self._max_per_owner = max_per_owner
        self._by_owner: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Transfers under way."""
        return self._by_owner.total()

    @contextmanager
    def one(self, owner: str) -> Generator[None]:
        """Enter for as long as a transfer of ``owner`` takes.

        Raises:
            TooManyError: there are as many as allowed, of this owner or of all.
        """
        whose = None
        if self._by_owner[owner] >= self._max_per_owner:
            whose = f"of this key ({self._max_per_owner})"
        elif self.count >= self._max_all:
            whose = f"of all keys ({self._max_all})"
        if whose is not None:
            raise TooManyError(
                f"too many {self._kind} {whose} are under way: wait until one is done",
                code=f"too_many_{self._kind}",
            )
        self._by_owner[owner] += 1
        try:
            yield
        finally:
            self._by_owner[owner] -= 1
            self._by_owner += Counter()  # Forgets who has none.
