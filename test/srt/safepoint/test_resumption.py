"""A pass that was stopped goes on where it stopped, in plain layers without an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sglang_coserve.srt.safepoint.gates import LeaderGate, PreemptionFlag
from sglang_coserve.srt.safepoint.instrument import ForwardPreempted, Resumption, add_safepoints

LAYERS, TOKENS, WIDTH = 6, 7, 4


class Layer(nn.Module):
    """Changes the residual in place, as fused norms do; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
        self.calls += 1
        residual = x.clone() if residual is None else residual.add_(x)
        return torch.tanh(self.product(residual)), residual


class Model:
    """Layers with a safepoint before each."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layers = [Layer() for _ in range(LAYERS)]
        self.flag = PreemptionFlag()
        self.gate = LeaderGate(self.flag)
        add_safepoints(self.layers, 1, self.gate)
        self.resumption = Resumption(self.layers)

    @torch.no_grad()
    def run(self, x: torch.Tensor) -> torch.Tensor:
        residual: torch.Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual)
        return x + residual

    def run_until(self, x: torch.Tensor, last: int) -> int:
        """Stop the pass while this layer runs; return the first that did not."""
        layer = self.layers[last]
        product = layer.product.register_forward_hook(lambda *_: self.flag.raise_for(1))
        self.gate.arm(1)
        try:
            with pytest.raises(ForwardPreempted) as preempted:
                self.run(x)
        finally:
            product.remove()
            self.gate.disarm()
            self.flag.lower()
        return preempted.value.layer


@pytest.mark.parametrize("last", range(LAYERS - 1))
def test_it_comes_out_as_if_nothing_had_happened(last: int) -> None:
    model, x = Model(), torch.randn(TOKENS, WIDTH)
    whole = model.run(x)
    first = model.run_until(x, last)
    assert first == last + 1
    kept = model.resumption.outputs
    assert not torch.allclose(model.run(2 * x), whole)  # Of other batches, meanwhile.
    with model.resumption.resuming(first, kept):
        torch.testing.assert_close(model.run(x), whole)
    assert [layer.calls for layer in model.layers] == [3] * LAYERS
    torch.testing.assert_close(model.run(x), whole)


def test_it_may_stop_again_at_once_or_later() -> None:
    model, x = Model(), torch.randn(TOKENS, WIDTH)
    whole = model.run(x)
    first = model.run_until(x, 1)
    kept = model.resumption.outputs
    model.gate.arm(2)
    model.flag.raise_for(2)
    with model.resumption.resuming(first, kept), pytest.raises(ForwardPreempted) as stop:
        model.run(x)
    model.gate.disarm()
    model.flag.lower()
    assert stop.value.layer == first
    with model.resumption.resuming(first, kept):
        second = model.run_until(x, 3)
        kept = model.resumption.outputs
    with model.resumption.resuming(second, kept):
        torch.testing.assert_close(model.run(x), whole)
    assert [layer.calls for layer in model.layers] == [2] * LAYERS


def test_nothing_is_kept_of_a_pass_that_has_ended() -> None:
    model = Model()
    model.run(torch.randn(TOKENS, WIDTH))
    assert model.resumption.outputs is None
