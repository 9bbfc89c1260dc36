"""Which model a fleet serves while its engines are being exchanged for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

__all__ = ["model_of_most"]


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
