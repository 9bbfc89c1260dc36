"""A pass that is ended goes on with some of its tokens, in plain layers without an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sglang_coserve.srt.safepoint.flag import PreemptionFlag
from sglang_coserve.srt.safepoint.instrument import ForwardPreempted, add_safepoints
from sglang_coserve.srt.safepoint.local_gate import LocalGate
from sglang_coserve.srt.safepoint.resumption import Resumption

LAYERS, TOKENS, WIDTH = 6, 7, 4
KEPT = torch.tensor([1, 2, 6])


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
        self.gate = LocalGate(self.flag)
        add_safepoints(self.layers, 1, self.gate)
        self.resumption = Resumption(self.layers)

    @torch.no_grad()
    def run(self, x: torch.Tensor) -> torch.Tensor:
        residual: torch.Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual)
        return x + residual

    def run_until(self, x: torch.Tensor, last: int) -> int:
        """Ask for the end of the pass while this layer runs; return the first that did not."""
        layer = self.layers[last]
        product = layer.product.register_forward_hook(lambda *_: self.flag.raise_for(1))
        self.gate.arm(1, 0.0)
        try:
            with pytest.raises(ForwardPreempted) as preempted:
                self.run(x)
        finally:
            product.remove()
            self.gate.disarm()
            self.flag.lower()
        return preempted.value.layer


@pytest.mark.parametrize("last", range(LAYERS - 1))
def test_the_tokens_that_stay_come_out_as_if_nothing_had_happened(last: int) -> None:
    model, x = Model(), torch.randn(TOKENS, WIDTH)
    whole = model.run(x)
    first = model.run_until(x, last)
    assert first == last + 1
    assert model.resumption.can_resume(TOKENS)
    with model.resumption.skipping(first, KEPT):
        resumed = model.run(x[KEPT])
    torch.testing.assert_close(resumed, whole[KEPT])
    assert [layer.calls for layer in model.layers] == [2] * LAYERS
    torch.testing.assert_close(model.run(x), whole)


def test_a_pass_that_had_not_begun_is_run_from_its_start() -> None:
    model, x = Model(), torch.randn(TOKENS, WIDTH)
    whole = model.run(x)
    assert model.resumption.can_resume(TOKENS)
    with model.resumption.skipping(0, KEPT):
        torch.testing.assert_close(model.run(x[KEPT]), whole[KEPT])


def test_outputs_that_are_not_by_token_are_told_apart() -> None:
    model = Model()
    model.run_until(torch.randn(TOKENS, WIDTH), 2)
    assert not model.resumption.can_resume(TOKENS + 1)


def test_marks_on_a_tensor_stay_on_its_rows() -> None:
    model = Model()
    marked = torch.zeros(TOKENS, WIDTH)
    marked.is_to_be_summed = True  # type: ignore[attr-defined]
    model.resumption.keep((marked, None))
    with model.resumption.skipping(1, KEPT):
        x, rest = model.layers[0](torch.zeros(len(KEPT), WIDTH), None)
    assert x.is_to_be_summed
    assert len(x) == len(KEPT)
    assert rest is None
