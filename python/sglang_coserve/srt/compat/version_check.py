"""Refuses a version of SGLang that this package does not run on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from sglang_coserve.errors import UnsupportedError
from sglang_coserve.srt.compat.versions import (
    NEWEST,
    installed_version,
    is_supported,
    supported_text,
)

__all__ = ["OVERRIDE_VARIABLE", "check_version"]

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
    if not is_supported(found) and environment.get(OVERRIDE_VARIABLE) != "1":
        raise UnsupportedError(
            f"sglang_coserve supports SGLang {supported_text()}, found {found}: pip install "
            f"sglang=={NEWEST}, or set {OVERRIDE_VARIABLE}=1 to try it with {found}"
        )
