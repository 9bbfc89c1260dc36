"""Puts safepoints between the layers of a model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch import nn

__all__ = ["ForwardPreempted", "Gate", "add_safepoints", "fitting_interval", "safepoint_cost_s"]


_LEAST_SAFEPOINTS: Final = 4
"""In one pass, where the model has as many layers."""


class ForwardPreempted(BaseException):
    """Stops a forward pass at a safepoint.

    No ``Exception``: what runs a forward pass may catch those and take them for failures.
    """

    def __init__(self, layer: int) -> None:
        """``layer`` is the first that did not run, the same on all ranks."""
        super().__init__(f"preempted before layer {layer}")
        self.layer = layer


class Gate(Protocol):
    """Says at a safepoint whether the pass goes on; only an armed batch is ever stopped."""

    attention: memoryview
    """While its first word is 0, safepoints do not ask."""

    def arm(self, batch: int) -> None:
        """Let this batch be stopped."""
        ...

    def disarm(self) -> None:
        """Stop nothing any more."""
        ...

    def reached(self, layer: int) -> None:
        """Return if the pass goes on.

        Raises:
            ForwardPreempted: it does not.
        """
        ...


def fitting_interval(interval: int, num_layers: int) -> int:
    """Return the interval for a model: the one asked for, but at most a quarter of the layers.

    The fewer layers a model has, the longer one takes of the whole, and the longer an
    arrival waits for it.
    """
    return min(interval, max(1, num_layers // _LEAST_SAFEPOINTS))


def add_safepoints(layers: Sequence[nn.Module], interval: int, gate: Gate) -> int:
    """Put a safepoint before every ``interval``-th layer, from the first; return how many.

    Nothing but the instances' attribute ``forward`` is replaced: a hook of torch costs
    six times as much. The safepoints stay for good.
    """
    numbers = range(0, len(layers), interval)
    for number in numbers:
        _add_safepoint(layers[number], number, gate)
    return len(numbers)


def _add_safepoint(layer: nn.Module, number: int, gate: Gate) -> None:
    forward, attention, reached = layer.forward, gate.attention, gate.reached

    def forward_from_safepoint(*args: Any, **kwargs: Any) -> Any:
        if attention[0]:
            reached(number)
        return forward(*args, **kwargs)

    layer.forward = forward_from_safepoint


def safepoint_cost_s(gate: Gate, calls: int = 2000) -> float:
    """Return what a safepoint at which nothing is asked adds to a call, measured here and now.

    The least of several runs: what else the machine does can only add to it.
    """
    plain, safe = _Identity(), _Identity()
    _add_safepoint(safe, 0, gate)
    x = torch.empty(0)
    return max(_call_s(safe, x, calls) - _call_s(plain, x, calls), 0.0)


class _Identity(nn.Module):
    def forward(self, x: torch.Tensor, **_kwargs: Any) -> torch.Tensor:
        return x


def _call_s(module: nn.Module, x: torch.Tensor, calls: int) -> float:
    best_s = float("inf")
    for _ in range(5):
        start_s = time.perf_counter()
        for _ in range(calls):
            module(x, residual=None)
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s / calls
