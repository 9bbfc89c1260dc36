"""Lets a forward pass go on, with some of its rows, from the layer at which it was ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["Resumption"]


class Resumption:
    """Stands around the layers of a model that runs layer by layer.

    A pass that goes on is a new one with fewer rows, whose first layers are left out: each
    of them returns what the last layer that had run computed for these rows. So nothing of
    the engine has to know of it: positions, attention, sampling and results are those of
    any pass with these rows.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._first = 0
        self._tokens = torch.empty(0, dtype=torch.int64)
        self._computed: Any = None
        self._resumed: Any = None
        for number, layer in enumerate(layers):
            _stand_around(self, number, layer, is_last=number == len(layers) - 1)

    def can_resume(self, num_tokens: int) -> bool:
        """Return whether what the ended pass has computed can be told apart by tokens."""
        return all(
            value.dim() > 0 and len(value) == num_tokens for value in _tensors(self._computed)
        )

    @contextmanager
    def skipping(self, layer: int, tokens: torch.Tensor) -> Iterator[None]:
        """Within it a pass of these tokens begins before ``layer``.

        ``tokens`` are places, of int64 [kept tokens], in the pass that was ended there.
        """
        self._first, self._tokens = layer, tokens
        try:
            yield
        finally:
            self._first, self._resumed = 0, None

    @contextmanager
    def resuming(self, layer: int, outputs: Any) -> Iterator[None]:
        """Within it a pass begins before ``layer``, with these outputs of the layer before it."""
        self._first, self._resumed = layer, outputs
        try:
            yield
        finally:
            self._first, self._resumed = 0, None

    @property
    def outputs(self) -> Any:
        """What the last layer that ran has returned."""
        return self._computed

    # What follows is the layers' part.

    def is_skipped(self, number: int) -> bool:
        """Return whether this layer is left out."""
        return number < self._first

    def computed(self) -> Any:
        """Return what the layers that are left out computed for the tokens that go on."""
        if self._resumed is None:
            # Not when the pass was ended: here it is in the order of the pass's stream.
            self._resumed = _of_tokens(self._computed, self._tokens)
        return self._resumed

    def keep(self, outputs: Any) -> None:
        """Note what the last layer that ran has returned; None: the pass has ended."""
        self._computed = outputs


def _stand_around(resumption: Resumption, number: int, layer: nn.Module, *, is_last: bool) -> None:
    forward = layer.forward

    def forward_or_skip(*args: Any, **kwargs: Any) -> Any:
        if resumption.is_skipped(number):
            return resumption.computed()
        outputs = forward(*args, **kwargs)
        resumption.keep(None if is_last else outputs)
        return outputs

    layer.forward = forward_or_skip


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, tuple | list):
        for value in outputs:
            yield from _tensors(value)


def _of_tokens(outputs: Any, tokens: torch.Tensor) -> Any:
    if isinstance(outputs, torch.Tensor):
        chosen = outputs[tokens.to(outputs.device)]
        # SGLang marks tensors that are still to be summed over the ranks.
        vars(chosen).update(vars(outputs))
        return chosen
    if isinstance(outputs, tuple | list):
        return type(outputs)(_of_tokens(value, tokens) for value in outputs)
    return outputs
