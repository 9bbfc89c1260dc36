"""Rendezvous hashing: which engine has a prefix, as all who know the engines agree.

Each engine has a score for each key, and the highest score has the key. When an engine comes or
goes, only its own keys move (Thaler and Ravishankar, "Using name-based mappings to increase hit
rates", IEEE/ACM Transactions on Networking 6(1), 1998).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

_MIXING: Final = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
_LAST_SHIFT: Final = np.uint64(31)
"""Constants of splitmix64, in numpy's types, since a line is placed in microseconds."""


class Rendezvous:
    """Scores of candidates, by their names."""

    def __init__(self, names: Collection[str]) -> None:
        """Take the names of all candidates; their order has no effect."""
        self._names = sorted(names)
        self._known = frozenset(names)
        self._seeds = np.array([_hash(name.encode()) for name in self._names], np.uint64)

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def choose(self, key: bytes) -> str | None:
        """Return the candidate that has ``key``; None without candidates. O(candidates)."""
        if not self._names:
            return None
        return self._names[int(self._scores(key).argmax())]

    def order(self, key: bytes) -> Sequence[str]:
        """Return all candidates, the highest score for ``key`` first."""
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
