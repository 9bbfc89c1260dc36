"""Installs safepoints between the layers of a model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch import nn

__all__ = ["ForwardPreempted", "Gate", "add_safepoints", "fitting_interval", "safepoint_cost_s"]


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


class Gate(Protocol):
    """Decides at a safepoint whether the forward pass goes on; stops only armed batches."""

    attention: memoryview
    """While its first word is 0, safepoints do not call ``reached``."""

    def arm(self, batch: int) -> None:
        """Allow this batch to be stopped."""
        ...

    def disarm(self) -> None:
        """Allow no batch to be stopped."""
        ...

    def reached(self, layer: int) -> None:
        """Return if the pass goes on.

        Raises:
            ForwardPreempted: the pass must stop before ``layer``.
        """
        ...


def fitting_interval(interval: int, num_layers: int) -> int:
    """Return the interval for a model: the requested one, but at most a quarter of the layers.

    The fewer layers a model has, the larger the share of the step that one layer takes, and that
    an arriving request has to wait.
    """
    return min(interval, max(1, num_layers // _LEAST_SAFEPOINTS))


def add_safepoints(layers: Sequence[nn.Module], interval: int, gate: Gate) -> int:
    """Install a safepoint before every ``interval``-th layer, from the first; return their number.

    Only the attribute ``forward`` of the instances is replaced: a torch hook costs
    six times as much. The safepoints cannot be removed.
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
    """Measure the cost of a safepoint without an armed batch, in seconds per call.

    The minimum of several runs, as other load on the machine can only add to it.
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
