"""Finds the decoder layers of whatever model SGLang loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.utils import PPMissingLayer
from torch import nn

__all__ = ["decoder_layers"]

_LAYER_LISTS: Final = ("layers", "h", "blocks", "decoder_layers")
"""Attribute names that models use for the list of their layers."""

_INNER_MODELS: Final = ("model", "language_model", "transformer", "decoder", "thinker")
"""Attribute names of inner modules that have that list, directly or nested."""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers in order; empty if none are found.

    They are searched by name from the outside in, so that those of a vision encoder are not
    mistaken for them; else the longest list of modules that all have attention over the
    KV cache, whatever its name.
    """
    for module in _inner_models(model):
        for name in _LAYER_LISTS:
            layers = _of_container(getattr(module, name, None))
            if layers and any(map(_attends, layers)):
                return layers
    candidates = (_of_container(module) for module in model.modules())
    return max((layers for layers in candidates if all(map(_attends, layers))), key=len, default=[])


def _inner_models(model: nn.Module) -> Iterator[nn.Module]:
    seen: set[int] = set()
    outer: list[Any] = [model]
    while outer:
        module = outer.pop(0)
        if isinstance(module, nn.Module) and id(module) not in seen:
            seen.add(id(module))
            yield module
            outer += [getattr(module, name, None) for name in _INNER_MODELS]


def _of_container(container: object) -> list[nn.Module]:
    if isinstance(container, nn.ModuleDict):
        layers = list(container.values())
    elif isinstance(container, nn.ModuleList):
        layers = list(container)
    else:
        return []
    return [layer for layer in layers if not isinstance(layer, PPMissingLayer)]


def _attends(layer: nn.Module) -> bool:
    return any(isinstance(module, RadixAttention) for module in layer.modules())
