"""Parts of a step: one that fails must not cost the others, and is tried again later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang_coserve.errors import ServerError

__all__ = ["failed_parts", "raise_for_failures", "tried"]

_MESSAGE = 2000


def tried(name: str, part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a part's figures, or ``{"failed": why}``."""
    try:
        return part()
    except Exception as error:
        print(f"{name}: {error!r}", flush=True)
        return {"failed": repr(error)[:_MESSAGE]}


def failed_parts(figures: Mapping[str, Any], *path: str) -> list[str]:
    """Return the names of the parts that failed, at any depth."""
    if "failed" in figures:
        return ["/".join(path)]
    return [
        name
        for key, value in figures.items()
        if isinstance(value, Mapping)
        for name in failed_parts(value, *path, key)
    ]


def raise_for_failures(figures: Mapping[str, Any]) -> None:
    """Let a step fail once it has reported what the other parts gave.

    Raises:
        ServerError: a part failed.
    """
    if failed := failed_parts(figures):
        raise ServerError(f"failed: {', '.join(failed)}")
