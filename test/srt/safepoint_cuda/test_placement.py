"""Which graphs are cut on a GPU, and what follows for batches; the GPU itself is left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner_backend import BreakableCudaGraphBackend, FullCudaGraphBackend

from sglang_coserve.srt.forward_kind import ForwardKind
from sglang_coserve.srt.safepoint import placement
from sglang_coserve.srt.safepoint.gates import LeaderGate
from sglang_coserve.srt.safepoint.instrument import Resumption
from sglang_coserve.srt.safepoint.safepoints import Safepoints

LAYERS, INTERVAL = 8, 2
CUTS: Any = object()
"""Those of a kind of graphs."""


def runner_of(*, decode_graphs: bool = True) -> Any:
    """As much of a model runner on a GPU as is looked at; its prefills run on breakable graphs."""
    decode = SimpleNamespace(backend=FullCudaGraphBackend.__new__(FullCudaGraphBackend))
    prefill = SimpleNamespace(backend=BreakableCudaGraphBackend.__new__(BreakableCudaGraphBackend))
    return SimpleNamespace(
        prefill_cuda_graph_runner=prefill,
        decode_cuda_graph_runner=decode if decode_graphs else None,
    )


@pytest.fixture(autouse=True)
def cut(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The model runners whose prefill graphs were captured again."""
    runners: list[Any] = []
    monkeypatch.setattr(placement, "cut_prefill_graphs", lambda runner, _: runners.append(runner))
    return runners


def place(runner: Any, *, groups_decodes: bool = False) -> dict[ForwardKind, str]:
    return placement.cut_graphs(runner, lambda: CUTS, groups_decodes=groups_decodes)


def test_prefills_stop_with_graphs_and_without_and_decodes_do_not(cut: list[Any]) -> None:
    runner = runner_of()
    assert set(place(runner)) == {ForwardKind.DECODE}
    assert cut == [runner]
    assert place(runner_of(decode_graphs=False)) == {}


@pytest.mark.parametrize("why_not", [None, "a reason"])
def test_decode_graphs_are_grouped_where_that_is_asked_for_and_can_be(
    monkeypatch: pytest.MonkeyPatch, why_not: str | None
) -> None:
    made: list[Any] = []
    told: list[str] = []
    monkeypatch.setattr(placement.logger, "warning", lambda text, *args: told.append(text % args))
    monkeypatch.setattr(placement, "add_grouped_decode_graphs", lambda *args: made.append(args))
    monkeypatch.setattr(placement, "why_no_grouped_decode_graphs", lambda _: why_not)
    place(runner_of())
    assert not made
    runner = runner_of()
    no_safepoints = place(runner, groups_decodes=True)
    if why_not is None:
        assert made == [(runner, CUTS)]
        assert no_safepoints == {}
    else:
        assert not made
        assert set(no_safepoints) == {ForwardKind.DECODE}
        assert told == ["--safepoint-decode-graphs changes nothing: a reason"]


# --- What follows -------------------------------------------------------------------------


def safepoints_with(num_layers: int = LAYERS, **more: Any) -> Safepoints:
    gate = LeaderGate(list)
    resumption = Resumption([], INTERVAL, gate)
    return Safepoints(gate, resumption, num_layers=num_layers, interval=INTERVAL, **more)


def batch_of(mode: ForwardMode) -> Any:
    req = SimpleNamespace(rid="a", session=None, multimodal_inputs=None, input_embeds=None)
    return SimpleNamespace(
        forward_mode=mode,
        reqs=[req],
        decoding_reqs=[req],
        hicache_consumer_index=-1,
        seq_lens_cpu=torch.tensor([5]),
    )


def test_an_arrival_waits_for_all_groups_that_are_outstanding_at_most_for_the_whole() -> None:
    assert safepoints_with().stop_share == INTERVAL / LAYERS
    assert safepoints_with(outstanding_groups=2).stop_share == 2 * INTERVAL / LAYERS
    assert safepoints_with(num_layers=2, outstanding_groups=2).stop_share == 1.0


def test_what_meets_no_safepoint_is_not_armed() -> None:
    assert safepoints_with().decodes_stop
    safepoints = safepoints_with(no_safepoints=place(runner_of()))
    assert not safepoints.decodes_stop  # A single graph runs to its end.
    assert safepoints.why_it_must_end(batch_of(ForwardMode.EXTEND)) is None
    assert safepoints.why_it_must_end(batch_of(ForwardMode.MIXED)) is None
    assert "single CUDA graph" in str(safepoints.why_it_must_end(batch_of(ForwardMode.DECODE)))
