"""Bounds how many uploads, or downloads, run at the same time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from sglang_coserve.batch.errors import TooManyError

__all__ = ["Transfers"]


class Transfers:
    """The places of transfers. An owner may take as many as are still free."""

    def __init__(self, kind: str, most: int) -> None:
        self._kind = kind
        self._most = most
        self._by_owner: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Transfers under way."""
        return self._by_owner.total()

    @contextmanager
    def one(self, owner: str) -> Generator[None]:
        """Enter for as long as a transfer of ``owner`` takes.

        Raises:
            TooManyError: there are too many, of this owner or of all.
        """
        count, free = self._by_owner[owner], self._most - self.count
        if count >= free:
            raise TooManyError(
                f"{count} {self._kind} of this key are under way, and {free} more could be of all "
                f"keys: wait until one is done",
                code=f"too_many_{self._kind}",
            )
        self._by_owner[owner] += 1
        try:
            yield
        finally:
            self._by_owner[owner] -= 1
            self._by_owner += Counter()  # Owners without transfers are removed.
