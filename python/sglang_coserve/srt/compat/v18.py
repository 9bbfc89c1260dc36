"""What has changed with SGLang 0.5.18: how requests fail before the scheduler has them, and a
setting."""

from __future__ import annotations

__all__ = ["aborted_errors", "check_extra_keys", "own_number_settings"]


def aborted_errors() -> tuple[type[Exception], ...]:
    """As in ``v17``; SGLang has no such error any more, and answers as for a running request."""
    return ()


def check_extra_keys() -> None:
    """As in ``v17``; SGLang checks them itself."""


def own_number_settings() -> tuple[str, ...]:
    """As in ``v17``."""
    return ()
