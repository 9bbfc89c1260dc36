"""Which versions of SGLang this package runs on, and the one that is installed."""

from __future__ import annotations

import importlib.metadata
import re
from typing import Final

__all__ = [
    "INSTALLED",
    "NEWEST",
    "OLDEST",
    "TESTED",
    "installed_version",
    "is_supported",
    "start_up_line",
    "version_key",
]

OLDEST: Final = "0.5.17"
NEWEST: Final = "0.5.23"
"""The first and the last version that the seams were checked against."""

TESTED: Final = ("0.5.17", "0.5.23")
"""The versions with which the whole test suite has passed."""

VersionKey = tuple[int, int, int]


def version_key(version: str) -> VersionKey:
    """Return the numbers of a version such as ``0.5.17`` or ``0.5.17.post1``, for comparisons.

    Raises:
        ValueError: it does not begin with three numbers.
    """
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers is None:
        raise ValueError(f"not a version of SGLang: {version!r} (expected for example {NEWEST})")
    major, minor, patch = map(int, numbers.groups())
    return major, minor, patch


def installed_version() -> str | None:
    """Return the version of SGLang that is installed; None if there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


INSTALLED: Final[VersionKey] = version_key(installed_version() or NEWEST)
"""The version by which ``by_version`` chooses."""


def is_supported(version: str) -> bool:
    """Return whether ``version`` is in the range."""
    return version_key(OLDEST) <= version_key(version) <= version_key(NEWEST)


def start_up_line() -> str:
    """Name the installed version, and what is known of it, for the log of a server."""
    return (
        f"co-serving on SGLang {installed_version()} (supported: {OLDEST} to {NEWEST}; the whole "
        f"test suite was run with {', '.join(TESTED)})"
    )
