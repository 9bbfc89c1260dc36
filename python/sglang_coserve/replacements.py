"""Replaces module-level names of SGLang in this process, kernels among them."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from sglang_coserve.errors import StartupError


def replace(name: str, value: Any) -> Any:
    """Set a module-level name of SGLang to ``value``; return the old value.

    ``name`` is dotted, and listed in ``scripts/seams/seams.txt``. Imports the module.

    Raises:
        StartupError: there is no such name in this SGLang, so that replacing it would do nothing.
    """
    owner, _, attribute = name.rpartition(".")
    try:
        module = importlib.import_module(owner)
        former = getattr(module, attribute)
    except (ImportError, AttributeError):
        raise StartupError(
            f"SGLang {importlib.metadata.version('sglang')} has no {name}, which co-serving "
            "replaces: install a supported version"
        ) from None
    setattr(module, attribute, value)
    return former


class LaunchedFunction:
    """A Python function that is launched like a Triton kernel: ``kernel[grid](...)``."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __getitem__(self, grid: object) -> Any:
        return self._function
