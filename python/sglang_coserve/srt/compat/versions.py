"""Which versions of SGLang this package runs on; refuses others."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping
from typing import Final

from sglang_coserve.errors import UnsupportedError

SUPPORTED: Final = ("0.5.17", "0.5.23")
"""The versions with which the whole test suite has passed. The first one is for torch 2.11."""

NEWEST: Final = SUPPORTED[-1]


def version_key(version: str) -> tuple[int, int, int]:
    """Return the numbers of a version such as ``0.5.17`` or ``0.5.17.post1``, for comparisons.

    Raises:
        ValueError: it does not begin with numbers; a third one that is missing is 0.
    """
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if numbers is None:
        raise ValueError(f"not a version of SGLang: {version!r} (expected for example {NEWEST})")
    major, minor, patch = map(int, numbers.groups("0"))
    return major, minor, patch


def installed_version() -> str | None:
    """Return the version of SGLang that is installed; None if there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def module_for(version: str) -> str:
    """Return the name of the module that ``by_version`` takes for ``version``: ``v17`` before
    0.5.23, ``v23`` from 0.5.23 on. ``version`` need not be a supported one."""
    return "v17" if version_key(version) < version_key("0.5.23") else "v23"


def supported_text() -> str:
    """Return the supported versions as a list in words."""
    older = ", ".join(SUPPORTED[:-1])
    return f"{older} and {NEWEST}" if older else NEWEST


def start_up_line() -> str:
    """Name the installed version, and what is known of it, for the log of a server."""
    return f"co-serving on SGLang {installed_version()} (supported: {supported_text()})"


OVERRIDE_VARIABLE: Final = "COSERVE_UNTESTED_SGLANG"
"""Set to 1, another version is tried, whatever it lacks."""


def check_version(environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a version of SGLang that is not supported.

    With ``COSERVE_UNTESTED_SGLANG=1`` in the environment it is tried: ``scripts/sglang-seams`` says
    what it lacks.

    Raises:
        UnsupportedError: no SGLang is installed, or another version.
    """
    found = installed_version()
    if found is None:
        raise UnsupportedError(
            f"sglang_coserve needs SGLang, and none is installed (supported: {supported_text()}): "
            "pip install 'sglang-coserve[engine]'"
        )
    released = re.sub(r"(\.post\d+)?(\+.*)?$", "", found)  # What it may be a later build of.
    if released not in SUPPORTED and environment.get(OVERRIDE_VARIABLE) != "1":
        raise UnsupportedError(
            f"sglang_coserve supports SGLang {supported_text()}, found {found}: pip install "
            f"sglang=={NEWEST}, or set {OVERRIDE_VARIABLE}=1 to try it with {found}"
        )
