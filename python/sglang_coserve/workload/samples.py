"""The bundled samples, found wherever the package is installed."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Final, Literal

__all__ = ["sample_path"]

_FILES: Final = {"online": "online_sample.csv", "offline": "offline_sample.jsonl"}


def sample_path(name: Literal["online", "offline"]) -> Path:
    """Return the path of a bundled sample.

    ``online`` is a ten-minute trace in Azure's CSV format, ``offline`` a JSONL
    file of 400 chat requests in the OpenAI batch format. Both are synthetic;
    ``scripts/samples/make_sample.py`` writes them anew.
    """
    return Path(str(files("sglang_coserve") / "data" / _FILES[name]))
