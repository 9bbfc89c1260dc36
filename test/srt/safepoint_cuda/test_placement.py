"""What is put where on a GPU, and what follows from it for batches; the GPU itself is left out."""

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
from sglang_coserve.srt.safepoint.placement import SafepointPlacement, place_on_cuda
from sglang_coserve.srt.safepoint.safepoints import Safepoints
from srt.safepoint_cuda.call_graphs import Layer

LAYERS, INTERVAL = 8, 2


def some_layers(count: int) -> list[Layer]:
    return [Layer(number, []) for number in range(count)]


def scheduler_of(*, decode_graphs: bool = True) -> Any:
    """As much of a scheduler on a GPU as is looked at; its prefills run on breakable graphs."""
    decode = SimpleNamespace(backend=FullCudaGraphBackend.__new__(FullCudaGraphBackend))
    prefill = SimpleNamespace(backend=BreakableCudaGraphBackend.__new__(BreakableCudaGraphBackend))
    runner = SimpleNamespace(
        prefill_cuda_graph_runner=prefill,
        decode_cuda_graph_runner=decode if decode_graphs else None,
    )
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))


@pytest.fixture(autouse=True)
def cut(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The model runners whose prefill graphs were captured again."""
    runners: list[Any] = []
    monkeypatch.setattr(placement, "cut_prefill_graphs", lambda runner, _: runners.append(runner))
    return runners


def place(scheduler: Any, *, groups_decodes: bool = False) -> SafepointPlacement:
    gate = LeaderGate(list)
    layers = some_layers(LAYERS)
    return place_on_cuda(scheduler, layers, INTERVAL, gate, groups_decodes=groups_decodes)


def test_prefills_stop_with_graphs_and_without_and_decodes_do_not(cut: list[Any]) -> None:
    scheduler = scheduler_of()
    placed = place(scheduler)
    assert cut == [scheduler.tp_worker.model_runner]
    assert set(placed.no_safepoints) == {ForwardKind.DECODE}
    assert place(scheduler_of(decode_graphs=False)).no_safepoints == {}


@pytest.mark.parametrize("why_not", [None, "a reason"])
def test_decode_graphs_are_grouped_where_that_is_asked_for_and_can_be(
    monkeypatch: pytest.MonkeyPatch, why_not: str | None
) -> None:
    made: list[Any] = []
    told: list[str] = []
    monkeypatch.setattr(placement.logger, "warning", lambda text, *args: told.append(text % args))
    monkeypatch.setattr(placement, "add_grouped_decode_graphs", lambda *args: made.append(args))
    monkeypatch.setattr(placement, "why_no_grouped_decode_graphs", lambda _: why_not)
    place(scheduler_of())
    assert not made
    scheduler = scheduler_of()
    placed = place(scheduler, groups_decodes=True)
    if why_not is None:
        ((runner, _, gate),) = made
        assert (runner, gate) == (scheduler.tp_worker.model_runner, placed.gate)
        assert placed.no_safepoints == {}
    else:
        assert not made
        assert set(placed.no_safepoints) == {ForwardKind.DECODE}
        assert told == ["--safepoint-decode-graphs changes nothing: a reason"]


# --- What follows -------------------------------------------------------------------------


def safepoints_with(placed: SafepointPlacement) -> Safepoints:
    return Safepoints(placed, num_layers=LAYERS, interval=INTERVAL)


def batch_of(mode: ForwardMode) -> Any:
    req = SimpleNamespace(rid="a", session=None, multimodal_inputs=None, input_embeds=None)
    return SimpleNamespace(
        forward_mode=mode,
        reqs=[req],
        decoding_reqs=[req],
        hicache_consumer_index=-1,
        seq_lens_cpu=torch.tensor([5]),
    )


def test_an_arrival_waits_for_all_groups_that_are_outstanding() -> None:
    gate = LeaderGate(list)
    on_cpu = safepoints_with(SafepointPlacement(gate, Resumption(some_layers(LAYERS)), 1))
    on_cuda = safepoints_with(place(scheduler_of()))
    assert on_cpu.stop_share == INTERVAL / LAYERS
    assert on_cuda.stop_share == 2 * INTERVAL / LAYERS
    assert on_cpu.decodes_stop
    assert not on_cuda.decodes_stop  # A single graph runs to its end.


def test_no_share_is_more_than_the_whole() -> None:
    placed = SafepointPlacement(LeaderGate(list), Resumption([]), 2)
    few = Safepoints(placed, num_layers=2, interval=2)
    assert few.stop_share == 1.0


def test_what_meets_no_safepoint_is_not_armed() -> None:
    safepoints = safepoints_with(place(scheduler_of()))
    assert safepoints.why_it_must_end(batch_of(ForwardMode.EXTEND)) is None
    assert safepoints.why_it_must_end(batch_of(ForwardMode.MIXED)) is None
    assert "single CUDA graph" in str(safepoints.why_it_must_end(batch_of(ForwardMode.DECODE)))
