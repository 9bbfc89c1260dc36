"""What is put where on a GPU, and what follows from it for batches; the GPU itself is left out."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner_backend import BreakableCudaGraphBackend, FullCudaGraphBackend

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.preemption_guard import GuardConfig
from sglang_coserve.errors import UnsupportedError
from sglang_coserve.srt.safepoint import placement
from sglang_coserve.srt.safepoint.eligibility import why_no_safepoints
from sglang_coserve.srt.safepoint.flag import PreemptionFlag
from sglang_coserve.srt.safepoint.in_flight import BatchKind
from sglang_coserve.srt.safepoint.local_gate import LocalGate
from sglang_coserve.srt.safepoint.placement import Placement, place_on_cpu, place_on_cuda
from sglang_coserve.srt.safepoint.run_ahead import RunAheadGate
from sglang_coserve.srt.safepoint.safepoints import Safepoints
from srt.safepoint_cuda.attending_model import ScalingBackend, some_layers

LAYERS, INTERVAL = 8, 2
GROUPED = CoserveConfig(safepoint_decode_graphs=True)


class PassedEvent:
    """The mark of a device that is always done."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        placement, "cuda_events", lambda depth: [PassedEvent() for _ in range(depth + 1)]
    )


def scheduler_of(rank: int = 0, *, decode_graphs: bool = True) -> Any:
    """As much of a scheduler on a GPU as is looked at; its prefills run on breakable graphs."""
    decode = SimpleNamespace(backend=FullCudaGraphBackend.__new__(FullCudaGraphBackend))
    prefill = SimpleNamespace(backend=BreakableCudaGraphBackend.__new__(BreakableCudaGraphBackend))
    runner = SimpleNamespace(
        attn_backend=ScalingBackend(),
        prefill_cuda_graph_runner=prefill,
        decode_cuda_graph_runner=decode if decode_graphs else None,
    )
    return SimpleNamespace(
        ps=SimpleNamespace(tp_rank=rank), tp_worker=SimpleNamespace(model_runner=runner)
    )


def place(scheduler: Any, config: CoserveConfig | None = None) -> Placement:
    flag = PreemptionFlag()
    layers = some_layers(LAYERS)
    return place_on_cuda(
        scheduler, config or CoserveConfig(), layers, INTERVAL, LocalGate(flag), flag
    )


def test_only_the_first_rank_waits_for_its_gpu() -> None:
    leader, follower = (place(scheduler_of(rank)) for rank in range(2))
    assert isinstance(leader.gate, RunAheadGate)
    assert isinstance(follower.gate, LocalGate)
    assert leader.outstanding_groups == follower.outstanding_groups == leader.gate.depth + 1


def test_layers_are_left_as_the_graphs_know_them() -> None:
    scheduler = scheduler_of()
    placed = place(scheduler)
    backend = scheduler.tp_worker.model_runner.attn_backend
    assert "forward" in vars(backend)
    assert set(placed.kept) == {BatchKind.DECODE}


def test_grouped_decode_graphs_are_made_where_they_are_asked_for_and_can_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(placement, "add_grouped_decode_graphs", lambda *args: made.append(args))
    monkeypatch.setattr(placement, "why_no_grouped_decode_graphs", lambda _: None)
    place(scheduler_of())
    assert not made
    scheduler = scheduler_of()
    placed = place(scheduler, GROUPED)
    ((runner, _, interval, gate),) = made
    assert runner is scheduler.tp_worker.model_runner
    assert (interval, gate) == (INTERVAL, placed.gate)
    monkeypatch.undo()
    monkeypatch.setattr(placement, "cuda_events", lambda depth: [PassedEvent()] * (depth + 1))
    with caplog.at_level(logging.WARNING):
        assert place(scheduler_of(decode_graphs=False), GROUPED).kept == {}
    assert "changes nothing: decode steps run without CUDA graphs" in caplog.text


def test_rows_leave_between_layers_and_never_a_graph() -> None:
    shrink = CoserveConfig(safepoint_mode="shrink")
    with pytest.raises(UnsupportedError, match="add --cuda-graph-backend-prefill disabled"):
        place(scheduler_of(), shrink)
    scheduler = scheduler_of()
    runner = scheduler.tp_worker.model_runner
    runner.prefill_cuda_graph_runner = SimpleNamespace()  # SGLang's eager runner.
    placed = place(scheduler, shrink)
    assert placed.resumption is not None
    assert "forward" not in vars(runner.attn_backend)
    assert set(placed.kept) == {BatchKind.DECODE}


# --- What follows -------------------------------------------------------------------------


def safepoints_with(placed: Placement) -> Safepoints:
    return Safepoints(placed, None, GuardConfig(), num_layers=LAYERS, interval=INTERVAL)


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
    gate = LocalGate(PreemptionFlag())
    on_cpu = safepoints_with(place_on_cpu(CoserveConfig(), some_layers(LAYERS), INTERVAL, gate))
    on_cuda = safepoints_with(place(scheduler_of()))
    assert on_cpu.arrival_wait_share(0.0, may_prefill=True) == INTERVAL / LAYERS
    assert on_cuda.arrival_wait_share(0.0, may_prefill=True) == 2 * INTERVAL / LAYERS
    assert on_cpu.arrival_wait_share(0.0, may_prefill=False) == INTERVAL / LAYERS
    # A single graph runs to its end.
    assert on_cuda.arrival_wait_share(0.0, may_prefill=False) == 1.0


def test_no_share_is_more_than_the_whole() -> None:
    gate = LocalGate(PreemptionFlag())
    few = Safepoints(Placement(gate, 2), None, GuardConfig(), num_layers=2, interval=2)
    assert few.arrival_wait_share(0.0, may_prefill=True) == 1.0


def test_what_meets_no_safepoint_is_not_armed() -> None:
    safepoints = safepoints_with(place(scheduler_of()))
    assert safepoints.why_not(batch_of(ForwardMode.EXTEND), 0.0) is None
    assert safepoints.why_not(batch_of(ForwardMode.MIXED), 0.0) is None
    assert "single CUDA graph" in str(safepoints.why_not(batch_of(ForwardMode.DECODE), 0.0))


@pytest.mark.parametrize(
    ("device", "unified", "is_refused"),
    [("cuda", False, False), ("cuda", True, True), ("npu", False, True)],
)
def test_which_devices_have_safepoints(device: str, unified: bool, is_refused: bool) -> None:
    """No other reason holds for this engine."""

    class Nothing:
        def __getattr__(self, name: str) -> Any:
            return 1 if name.endswith("_size") else None

    scheduler = SimpleNamespace(
        device=device,
        enable_unified_memory=unified,
        is_generation=True,
        req_to_token_pool=None,
        is_hybrid_swa=False,
        model_config=Nothing(),
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        server_args=Nothing(),
        ps=Nothing(),
    )
    assert (why_no_safepoints(scheduler, some_layers(2)) is not None) == is_refused


def test_to_ask_how_long_an_arrival_waits_changes_nothing() -> None:
    """Also at another time, when aborts have cost more than they may, or no longer have."""
    safepoints = safepoints_with(place(scheduler_of()))
    safepoints.guard.aborted(["a"], 10.0, wasted_s=5.0)
    batch = batch_of(ForwardMode.EXTEND)
    for asked_s in (10.0, 1e6, 10.0):
        share = safepoints.arrival_wait_share(asked_s, may_prefill=True)
        assert (share == 1.0) == (asked_s == 10.0)
        assert "cost their share" in str(safepoints.why_not(batch, 10.0))
        assert safepoints.why_not(batch, 1e6) is None
