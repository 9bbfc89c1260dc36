"""Which model a fleet serves while its engines are being exchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def served_model(models: Iterable[str | None], present: str | None) -> str | None:
    """Return the model that a fleet serves: the ``present`` one, until most engines have another.

    Engines that do not answer count, too, with the model that they had last. So neither an outage
    nor a drain of the majority hands a batch to a canary's model, and a rolling exchange changes
    the model once, half-way.

    Args:
        models: The last known model of every listed engine; None if an engine was never asked.
        present: None before any engine was known. The most frequent model then counts, as where
            no listed engine has the present one.
    """
    models = list(models)
    counts = Counter(model for model in models if model is not None)
    if not counts:
        return present
    # By name among equals, so that the choice does not depend on who answered first.
    best = max(sorted(counts), key=counts.__getitem__)
    if present is None or not counts[present]:
        return best
    return best if 2 * counts[best] > len(models) else present
