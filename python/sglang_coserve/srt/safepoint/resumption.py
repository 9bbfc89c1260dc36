"""Lets a forward pass go on from the layer before which it was stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from sglang_coserve.srt import compat
from sglang_coserve.srt.safepoint.instrument import ForwardPreempted

__all__ = ["Resumption"]


class Resumption:
    """Stands around the layers of a model that runs layer by layer, and around their safepoints.

    A pass that goes on is a new one of the same batch, whose first layers are left out: each
    of them returns what the last layer that had run has computed. So nothing of the engine has
    to know of it: positions, attention, sampling and results are those of any pass. A pass
    that replays graphs is resumed by ``GraphCuts``, which asks here where.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.first = 0
        """The layer before which the pass begins."""

        self.resumed: Any = None
        """What was kept when the batch stopped there."""

        self.outputs: Any = None
        """What the last layer that ran has returned; once the pass has stopped, what is to be kept
        of it."""

        for number, layer in enumerate(layers):
            _stand_around(self, number, layer, is_last=number == len(layers) - 1)

    @contextmanager
    def resuming(self, layer: int, outputs: Any) -> Iterator[None]:
        """Within it a pass begins before ``layer``, with ``outputs`` as they were kept."""
        self.first, self.resumed = layer, outputs
        try:
            yield
        finally:
            self.first, self.resumed = 0, None


def _stand_around(resumption: Resumption, number: int, layer: nn.Module, *, is_last: bool) -> None:
    forward = layer.forward

    def forward_or_skip(*args: Any, **kwargs: Any) -> Any:
        if number < resumption.first:
            return compat.put_back_outputs(resumption.resumed, (*args, *kwargs.values()))
        try:
            outputs = forward(*args, **kwargs)
        except ForwardPreempted:
            arguments = (*args, *kwargs.values())
            resumption.outputs = compat.keep_outputs(resumption.outputs, arguments)
            raise
        resumption.outputs = None if is_last else outputs
        return outputs

    layer.forward = forward_or_skip
