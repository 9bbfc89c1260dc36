"""Rendezvous hashing: who is to have something, as all who know the candidates agree.

Each candidate has a score for each thing, and the highest has it; when a candidate comes or
goes, only what is its own moves (Thaler and Ravishankar, "Using name-based mappings to
increase hit rates", IEEE/ACM Transactions on Networking 6(1), 1998).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["Rendezvous"]

_MIXING: Final = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
_LAST_SHIFT: Final = np.uint64(31)
"""Of splitmix64. As numpy's own, since a line is placed in microseconds."""


class Rendezvous:
    """Scores of candidates, by their names."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = sorted(names)
        self._seeds = np.array([_hash(name.encode()) for name in self._names], np.uint64)

    def choose(self, key: bytes) -> str | None:
        """Return who is to have ``key``; None without candidates. O(their number)."""
        if not self._names:
            return None
        return self._names[int(self._scores(key).argmax())]

    def order(self, key: bytes) -> Sequence[str]:
        """Return all candidates, those first who are to have ``key`` first."""
        return [self._names[index] for index in np.argsort(self._scores(key))[::-1]]

    def _scores(self, key: bytes) -> npt.NDArray[np.uint64]:
        hashes: npt.NDArray[np.uint64] = self._seeds ^ np.uint64(_hash(key))
        return _mixed(hashes)


def _hash(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest())


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Finish a hash so that every bit depends on every other (splitmix64's last steps)."""
    for shift, factor in _MIXING:
        values = (values ^ (values >> shift)) * factor
    finished: npt.NDArray[np.uint64] = values ^ (values >> _LAST_SHIFT)
    return finished
