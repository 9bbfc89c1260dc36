"""What requests call a model: one rule for every route, and for lines of batches.

A server answers for the name of its model and for those of its adapters, alone or as
``MODEL:ADAPTER``. Who names no model, or ``default``, gets what is served.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["not_served", "served_name"]

_WHATEVER_IS_SERVED: Final = ("", "default")
_MAX_CHARS: Final = 128


def served_name(model: object, names: Sequence[str]) -> str | None:
    """Return what answers to ``model``: the model's name, or ``MODEL:ADAPTER``; None if nothing.

    What is no name, or cannot be checked because nothing is known, is for the engine to refuse.

    Args:
        model: As a request has it.
        names: The model's, then its adapters'; empty while they are unknown.
    """
    if not names:
        return model if isinstance(model, str) else ""
    name, *adapters = names
    if not isinstance(model, str) or model == name or model in _WHATEVER_IS_SERVED:
        return name
    if model in adapters:
        return f"{name}:{model}"
    base, _, adapter = model.rpartition(":")
    if adapter in adapters and base in (name, *_WHATEVER_IS_SERVED[1:]):
        return f"{name}:{adapter}"
    return None


def not_served(model: object, names: Sequence[str]) -> str:
    """Return what to say of a model that is not served."""
    asked = repr(model) if len(repr(model)) <= _MAX_CHARS else f"{repr(model)[:_MAX_CHARS]}…"
    known = ", ".join(map(repr, names))
    return f"the model {asked} is not served here: use {known}, or leave model out"
