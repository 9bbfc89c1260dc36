"""Lets torchvision be imported where its build does not fit torch's.

Not every index has a CPU build of torchvision. The compiled part of a CUDA build does not load
beside a CPU torch, and ``import torchvision`` then ends with "operator torchvision::nms does not
exist", although what SGLang and transformers use of it, the transforms of images, is plain Python.
It is enough that the two operators are declared; a call of one still fails.

``torch`` runs ``declare`` at the end of its own import, in every process of the environment:
pyproject.toml names it in the group ``torch.backends``.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

__all__ = ["declare"]

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[object] = []  # torch forgets what a library declares when it is collected.


def declare() -> None:
    """Declare torchvision's operators, unless its own can be loaded."""
    import torch

    found = find_spec("torchvision")
    if found is None or found.origin is None:
        return
    try:
        torch.ops.load_library(str(Path(found.origin).with_name("_C.so")))
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in _OPERATORS:
            library.define(operator)
        _libraries.append(library)
