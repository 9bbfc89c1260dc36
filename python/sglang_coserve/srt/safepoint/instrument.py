"""Installs safepoints between the decoder layers of a model, and resumes passes there."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.utils import PPMissingLayer
from torch import nn

from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.srt import compat

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


_LEAST_SAFEPOINTS: Final = 4
"""Least number of safepoints in a forward pass, if the model has as many layers."""


class ForwardPreempted(BaseException):
    """Stops a forward pass at a safepoint.

    Not an ``Exception``, because code that runs a forward pass may catch those as failures.
    """

    def __init__(self, layer: int) -> None:
        """``layer`` is the first layer that did not run, the same on all ranks."""
        super().__init__(f"preempted before layer {layer}")
        self.layer = layer


MustStop = Callable[[Sequence[RequestInfo], float], bool]
"""Says whether a batch is to stop for online requests that wait, at a time of
``time.perf_counter``."""


class Stops(NamedTuple):
    """When an armed batch is to stop before its end."""

    until_s: float = math.inf
    """At this time of ``time.perf_counter``, on the clock that all ranks share."""

    for_arrivals: MustStop = lambda _arrivals, _now_s: True


FOR_ANYBODY: Final = Stops()


class Gate(ABC):
    """Decides at a safepoint whether the forward pass goes on; stops only armed batches."""

    def __init__(self) -> None:
        self._stops = FOR_ANYBODY
        self.stops_for: Sequence[RequestInfo] = ()
        """The online requests that the batch armed last stops for, where this rank decides that."""

        # A numpy array has the item type that memoryview reads fastest.
        self.attention = memoryview(torch.zeros(1, dtype=torch.int32).numpy())
        """Its first word is the armed batch. While it is 0, safepoints do not call ``reached``."""

    def arm(self, batch: int, stops: Stops = FOR_ANYBODY) -> None:
        """Allow this batch to be stopped, by the rank that decides. All ranks arm the same
        batches."""
        self._stops, self.stops_for = stops, ()
        self.attention[0] = batch

    def disarm(self) -> None:
        """Allow no batch to be stopped."""
        self.attention[0] = 0

    @abstractmethod
    def reached(self, layer: int) -> None:
        """Return if the pass of the armed batch goes on.

        Raises:
            ForwardPreempted: the pass must stop before ``layer``.
        """


def fitting_interval(interval: int, num_layers: int) -> int:
    """Return the interval for a model: the requested one, but at most a quarter of the layers.

    The fewer layers a model has, the larger the share of the step that one layer takes, and that
    an arriving request has to wait.
    """
    return min(interval, max(1, num_layers // _LEAST_SAFEPOINTS))


class Resumption:
    """Wraps the layers of a model, so that a forward pass can stop, and skip those that have run.

    There is a safepoint before every ``interval``-th layer, from the first. A resumed pass is a new
    pass of the same batch in which the first layers are skipped: each
    of them just returns the outputs of the last layer that had run. So no other part of the engine
    is affected: positions, attention, sampling and results are computed as in any pass. Passes
    that replay CUDA graphs are resumed by ``GraphCuts``, which reads the layer from here.

    Only the attribute ``forward`` of the instances is replaced: a torch hook costs
    six times as much. That cannot be undone.
    """

    def __init__(self, layers: Sequence[nn.Module], interval: int, gate: Gate) -> None:
        self.first = 0
        """The first layer to run; 0 unless a pass is resumed."""

        self.resumed: Any = None
        """The outputs that were kept when the batch stopped before that layer."""

        self.outputs: Any = None
        """Outputs of the last layer that ran; after a stop, those to keep for the resumption."""

        for number, layer in enumerate(layers):
            stops, is_last = number % interval == 0, layer is layers[-1]
            self._wrap(number, layer, gate, stops=stops, is_last=is_last)

    @contextmanager
    def resuming(self, layer: int, outputs: Any) -> Iterator[None]:
        """Make a pass in this context begin at ``layer`` with the kept ``outputs``."""
        self.first, self.resumed = layer, outputs
        try:
            yield
        finally:
            self.first, self.resumed = 0, None

    def _wrap(
        self, number: int, layer: nn.Module, gate: Gate, *, stops: bool, is_last: bool
    ) -> None:
        forward, attention, reached = layer.forward, gate.attention, gate.reached

        def forward_or_skip(*args: Any, **kwargs: Any) -> Any:
            if number < self.first:
                return compat.put_back_outputs(self.resumed, (*args, *kwargs.values()))
            try:
                if stops and attention[0]:
                    reached(number)
                outputs = forward(*args, **kwargs)
            except ForwardPreempted:
                self.outputs = compat.keep_outputs(self.outputs, (*args, *kwargs.values()))
                raise
            self.outputs = None if is_last else outputs
            return outputs

        layer.forward = forward_or_skip
