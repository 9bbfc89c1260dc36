"""Resumes a forward pass at the layer before which it was stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from sglang_coserve.srt import compat
from sglang_coserve.srt.safepoint.instrument import ForwardPreempted

__all__ = ["Resumption"]


class Resumption:
    """Wraps the layers of a model, so that a forward pass can skip those that have run before.

    A resumed pass is a new pass of the same batch in which the first layers are skipped: each
    of them just returns the outputs of the last layer that had run. So no other part of the engine
    is affected: positions, attention, sampling and results are computed as in any pass. Passes
    that replay CUDA graphs are resumed by ``GraphCuts``, which reads the layer from here.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.first = 0
        """The first layer to run; 0 unless a pass is resumed."""

        self.resumed: Any = None
        """The outputs that were kept when the batch stopped before that layer."""

        self.outputs: Any = None
        """Outputs of the last layer that ran; after a stop, those to keep for the resumption."""

        for number, layer in enumerate(layers):
            _wrap_layer(self, number, layer, is_last=number == len(layers) - 1)

    @contextmanager
    def resuming(self, layer: int, outputs: Any) -> Iterator[None]:
        """Make a pass in this context begin at ``layer`` with the kept ``outputs``."""
        self.first, self.resumed = layer, outputs
        try:
            yield
        finally:
            self.first, self.resumed = 0, None


def _wrap_layer(resumption: Resumption, number: int, layer: nn.Module, *, is_last: bool) -> None:
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
