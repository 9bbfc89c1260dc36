"""Parts of a benchmark that is made again until all of them are measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

__all__ = ["measure_missing"]


def measure_missing(
    parts: Mapping[str, Callable[[], dict[str, Any]]],
    found: MutableMapping[str, Any],
    write: Callable[[], None],
) -> bool:
    """Measure the parts that ``found`` lacks; return whether it has all of them then.

    ``write`` is called after each. One that fails costs none of the others: it is printed, and the
    same command tries it again.
    """
    for name in [each for each in parts if each not in found]:
        try:
            found[name] = parts[name]()
        except (Exception, SystemExit) as error:
            print(f"{name} failed: {error!r}"[:2000], file=sys.stderr, flush=True)
        write()
    return parts.keys() <= found.keys()
