"""Which engine is to have a line, how many of them, and of which model.

- Rendezvous hashing decides who has a prefix, as all who know the candidates agree: each has a
  score for each thing, and the highest has it. When a candidate comes or goes, only what is its
  own moves (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM
  Transactions on Networking 6(1), 1998).
- A window bounds the lines of one engine. An engine that answers and fails is always free, so it
  would get, and fail, every line.
- A vote decides which model is served while engines are being exchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

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


LINES_AHEAD: Final = 16
"""Lines that wait in an engine beyond those that run there. Enough for it to choose by shared
prefix, and never to be without a next one between two looks at its load; few enough that
another engine, which is free earlier, can have the rest. It kept engines busy in every run of
``benchmark/fleet_chaos.py``; other numbers were not compared."""


FAILURES_IN_A_ROW: Final = 3
"""Lines that fail on any engine are rare, and others succeed in between; an engine that is broken
fails them all. Fewer than the attempts of a line, so that it outlives the engine."""

_FIRST_REST_S: Final = 5.0
"""Longer than a server takes to end that has noticed that its engine died."""

_MOST_REST_S: Final = 300.0


class FailureStreak:
    """When one engine is to be left alone. Times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._rest_s = _FIRST_REST_S
        self._rests_until_s = 0.0

    def succeeded(self) -> None:
        """Note that the engine served a line, or that a line was at fault."""
        self._num_failures = 0
        self._rest_s = _FIRST_REST_S

    def failed(self, now_s: float) -> None:
        """Note that the engine failed on a line; after some of them in a row it rests.

        Each rest is twice as long as the one before, up to five minutes, and ends with as many
        lines more.
        """
        self._num_failures += 1
        if self._num_failures >= FAILURES_IN_A_ROW and not self.is_resting(now_s):
            self._num_failures = 0
            self._rests_until_s = now_s + self._rest_s
            self._rest_s = min(_MOST_REST_S, 2 * self._rest_s)

    def is_resting(self, now_s: float) -> bool:
        """Tell whether the engine is to get nothing."""
        return now_s < self._rests_until_s


def line_window(in_flight: int, waiting: int) -> int:
    """Return how many lines an engine is to have: those that run, and ``LINES_AHEAD``.

    Args:
        in_flight: Lines that it had from us when it was asked.
        waiting: Offline requests that waited in it then, others' too: an engine that has much
            to do for others gets less of us, and at least one line, so that every job goes on.
    """
    return max(1, in_flight - waiting + LINES_AHEAD)


def model_of_most(models: Iterable[str], present: str | None) -> str | None:
    """Return the model of most engines; the ``present`` one while no other has more.

    So a rolling exchange changes the model once, half-way, and at any time at most half of the
    engines stand by. Without any engine it stays what it was.
    """
    counts = Counter(models)
    if not counts:
        return present
    # By name among equals: what comes first is not to depend on who answered first.
    best = max(sorted(counts), key=counts.__getitem__)
    return present if present is not None and counts[present] == counts[best] else best
