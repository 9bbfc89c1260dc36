"""Where safepoints are put, and what a pass does at one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.utils import PPMissingLayer
from torch import nn

from sglang_coserve.srt.safepoint.gates import LeaderGate, batch_id
from sglang_coserve.srt.safepoint.instrument import (
    ForwardPreempted,
    decoder_layers,
    fitting_interval,
)


class Layer(nn.Module):
    """Attends, as the layers of a decoder do, if it is told to."""

    def __init__(self, *, attends: bool = True) -> None:
        super().__init__()
        if attends:
            self.attention = RadixAttention(1, 8, 1.0, num_kv_heads=1, layer_id=0)


class Holder(nn.Module):
    """A module with the given attributes."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def some_layers(count: int = 3, **kwargs: Any) -> list[Layer]:
    return [Layer(**kwargs) for _ in range(count)]


# --- Finding the layers -------------------------------------------------------------------

WRAPPINGS: dict[str, Callable[[list[Layer]], nn.Module]] = {
    "model.layers": lambda layers: Holder(model=Holder(layers=nn.ModuleList(layers))),
    "transformer.h": lambda layers: Holder(transformer=Holder(h=nn.ModuleList(layers))),
    "decoder.blocks": lambda layers: Holder(
        model=Holder(decoder=Holder(blocks=nn.ModuleList(layers)))
    ),
    "a dict": lambda layers: Holder(
        model=Holder(layers=nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)}))
    ),
    "behind a vision encoder": lambda layers: Holder(
        visual=Holder(layers=nn.ModuleList(some_layers(9))),
        language_model=Holder(model=Holder(layers=nn.ModuleList(layers))),
    ),
    "thinker": lambda layers: Holder(thinker=Holder(model=Holder(layers=nn.ModuleList(layers)))),
    "under an unknown name": lambda layers: Holder(core=Holder(stages=nn.ModuleList(layers))),
    "beside lists that do not attend": lambda layers: Holder(
        model=Holder(layers=nn.ModuleList(some_layers(9, attends=False))),
        core=Holder(stages=nn.ModuleList(layers)),
    ),
}


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
def test_decoder_layers_are_found_in_order(wrap: Callable[[list[Layer]], nn.Module]) -> None:
    layers = some_layers()
    assert decoder_layers(wrap(layers)) == layers


def test_layers_of_other_pipeline_ranks_are_left_out() -> None:
    layers = some_layers(2)
    model = Holder(
        model=Holder(layers=nn.ModuleList([PPMissingLayer(), *layers, PPMissingLayer()]))
    )
    assert decoder_layers(model) == layers


def test_a_model_without_layers_has_none() -> None:
    assert decoder_layers(Holder(model=Holder(layers=nn.ModuleList()))) == []


# --- Passing safepoints -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "layers", "fitting"),
    [(4, 80, 4), (4, 16, 4), (4, 8, 2), (4, 6, 1), (4, 2, 1), (4, 1, 1), (1, 9, 1)],
)
def test_an_interval_is_at_most_a_quarter_of_the_layers(
    interval: int, layers: int, fitting: int
) -> None:
    assert fitting_interval(interval, layers) == fitting


def test_the_exception_is_none_that_a_graph_context_takes_for_a_failure() -> None:
    assert not issubclass(ForwardPreempted, Exception)


@pytest.mark.parametrize("count", [0, 1, 2**31 - 2, 2**31 - 1, 2**31, 2**40])
def test_names_of_batches_fit_the_gate_and_are_never_zero(count: int) -> None:
    gate = LeaderGate(list)
    gate.arm(batch_id(count))
    assert gate.attention[0] == batch_id(count) > 0
    assert batch_id(count) != batch_id(count + 1)
