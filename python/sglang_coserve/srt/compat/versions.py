"""Which versions of SGLang this package runs on, and the one that is installed."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping
from typing import Final

from sglang_coserve.errors import UnsupportedError

__all__ = [
    "INSTALLED",
    "NEWEST",
    "OLDEST",
    "OVERRIDE_VARIABLE",
    "TESTED",
    "check_version",
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

OVERRIDE_VARIABLE: Final = "COSERVE_UNTESTED_SGLANG"
"""Set to 1, another version is tried, if every seam is in it."""

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


def check_version(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a version of SGLang that is not in the range.

    With ``COSERVE_UNTESTED_SGLANG=1`` in the environment it is refused only if a seam is missing
    in it. That reads 50 of its files, which takes a second.

    Raises:
        UnsupportedError: no SGLang is installed, or another version.
    """
    found = installed_version()
    if found is None:
        raise UnsupportedError(
            f"sglang_coserve needs SGLang {OLDEST} to {NEWEST}, and none is installed: "
            f"pip install sglang=={NEWEST}"
        )
    if is_supported(found):
        return
    if environment.get(OVERRIDE_VARIABLE) != "1":
        raise UnsupportedError(
            f"sglang_coserve supports SGLang {OLDEST} to {NEWEST}, found {found}: pip install "
            f"sglang=={NEWEST}, or set {OVERRIDE_VARIABLE}=1 to try it with {found}"
        )
    _check_seams(found)


def _check_seams(version: str) -> None:
    from sglang_coserve.srt.compat.seam_check import problems
    from sglang_coserve.srt.compat.source_tree import SourceTree

    missing = problems(SourceTree.installed(), version)
    if missing:
        raise UnsupportedError(
            f"SGLang {version} lacks what co-serving relies on, {OVERRIDE_VARIABLE} or not: "
            + "; ".join(missing)
        )
