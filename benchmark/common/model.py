"""The model that is served."""

from __future__ import annotations

from pathlib import Path

from common.vision_model import make_vision_model
from sglang_coserve.small_model import SmallModelSpec, make_small_model

__all__ = ["prepare_model"]


def prepare_model(path: str | None, work: Path, *, takes_pictures: bool = False) -> str:
    """Return ``path``, a folder or a hub name; None makes a small model in ``work``, which
    ``takes_pictures`` or does not.
    """
    if path is not None:
        return path
    if takes_pictures:
        return str(make_vision_model(work / "model"))
    return str(make_small_model(work / "model", SmallModelSpec()))
