"""Lets a CUDA build of torchvision be imported beside a CPU build of torch.

No CPU wheel of torchvision is published for every platform, and SGLang and
transformers import torchvision for image processing that text models never use.
Beside a CPU torch the compiled part of a CUDA torchvision does not load, and its
Python part then fails with "operator torchvision::nms does not exist".  Defining
the two operator schemas first is enough for the import to work; the operators
themselves stay absent and raise if anything calls them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["install"]

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _SchemaDefiner(MetaPathFinder):
    """Finds nothing; defines the schemas when torchvision is first looked for."""

    def __init__(self) -> None:
        self._library: object = None  # A torch Library forgets its schemas when it is collected.

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname == "torchvision" and self._library is None:
            self._library = _define_schemas()
        return None


def _define_schemas() -> object:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    # A CUDA torch loads the real operators, which must not be defined twice.
    if torch.version.cuda is None:
        for schema in _SCHEMAS:
            library.define(schema)
    return library


def install() -> None:
    """Arrange for the schemas to exist before torchvision is imported.

    Costs nothing until then: torch is not imported here.
    """
    if not any(isinstance(finder, _SchemaDefiner) for finder in sys.meta_path):
        sys.meta_path.insert(0, _SchemaDefiner())
