"""Safepoints on a GPU. Written without one: nothing here has run so far."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sglang_coserve.config import CoserveConfig
from sglang_coserve.srt.safepoint.gates import LeaderGate, device_events, order_behind_pass
from sglang_coserve.srt.safepoint.instrument import ForwardPreempted, Resumption
from srt.own_engine import is_flushed, params

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

LAYERS, INTERVAL, WIDTH, ROWS = 12, 2, 2048, 32768
TIMEOUT_S = 300


class Layers:
    """A stack of matrix products, and a gate."""

    def __init__(self, *, depth: int = 1) -> None:
        torch.manual_seed(0)
        self.arrived: list[Any] = []
        self.gate = LeaderGate(lambda: self.arrived, device_events("cuda", depth))
        self.layers: list[nn.Module] = [
            nn.Linear(WIDTH, WIDTH, bias=False, device="cuda", dtype=torch.bfloat16)
            for _ in range(LAYERS)
        ]
        self.x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)

    @torch.no_grad()
    def run(self) -> torch.Tensor:
        x = self.x
        for layer in self.layers:
            x = layer(x)
        return x

    def run_armed(self, batch: int, run: Callable[[], Any]) -> Any:
        self.gate.arm(batch)
        try:
            return run()
        finally:
            self.gate.disarm()

    def stop_at_random(self, batch: int, run: Callable[[], Any], rng: random.Random) -> int | None:
        """Run an armed batch, for which something arrives some time; return where it stopped."""
        self.arrived.clear()
        delay_s = rng.uniform(0.0, 0.006)

        def arrive() -> None:
            time.sleep(delay_s)
            self.arrived.append("one")

        client = threading.Thread(target=arrive)
        client.start()
        try:
            self.run_armed(batch, run)
        except ForwardPreempted as preempted:
            return preempted.layer
        finally:
            client.join()
        return None


# --- Without SGLang's engine --------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_eager_passes_stop_and_the_next_one_is_whole(depth: int) -> None:
    subject = Layers(depth=depth)
    expected = subject.run().clone()
    Resumption(subject.layers, INTERVAL, subject.gate)
    rng = random.Random(depth)
    stops = [subject.stop_at_random(batch, subject.run, rng) for batch in range(1, 200)]
    assert len({stop for stop in stops if stop is not None}) > 2
    subject.arrived.clear()
    torch.testing.assert_close(subject.run_armed(1000, subject.run), expected, rtol=0, atol=0)


def test_what_follows_a_drop_on_the_other_stream_comes_after_the_pass() -> None:
    forward, schedule = torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(forward):
        torch.cuda._sleep(200_000_000)
        x.fill_(1.0)
    scheduler = SimpleNamespace(
        device="cuda", enable_overlap=True, forward_stream=forward, schedule_stream=schedule
    )
    order_behind_pass(scheduler)
    with torch.cuda.stream(schedule):
        x.fill_(2.0)
    torch.cuda.synchronize()
    assert x.item() == 2.0


# --- In the engine ------------------------------------------------------------------------

GRAPHS: dict[str, dict[str, Any]] = {
    "eager": {"cuda_graph_backend_prefill": "disabled", "cuda_graph_backend_decode": "disabled"},
    "breakable": {"cuda_graph_backend_prefill": "breakable"},
}


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long enough prefills for an arrival to come in the middle of one."""
    from sglang_coserve.small_model import SmallModelSpec, make_small_model

    spec = SmallModelSpec(hidden=1024, heads=8, kv_heads=8, layers=16, context=32768)
    return make_small_model(tmp_path_factory.mktemp("wide_model"), spec)


@pytest.fixture
def start(wide_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Starts an engine whose outputs do not depend on what is batched together."""
    from sglang_coserve.srt.engine import CoserveEngine

    monkeypatch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
    engines: list[Any] = []

    def start_engine(coserve: dict[str, Any] | None = None, **settings: Any) -> Any:
        config = CoserveConfig(
            offline_policy="coserve",
            slo_ttft_ms=1,
            safepoint_interval=2,
            **(coserve or {}),
        )
        engine = CoserveEngine(
            model_path=str(wide_model),
            dtype="bfloat16",
            attention_backend="triton",
            enable_deterministic_inference=True,
            chunked_prefill_size=16384,
            max_total_tokens=400_000,
            coserve_config=config,
            **settings,
        )
        engines.append(engine)
        return engine

    yield start_engine
    for engine in engines:
        engine.shutdown()


def run_both_classes(engine: Any, *, output_tokens: int) -> dict[str, Any]:
    """Check outputs against those of each request alone; return the safepoints' state."""
    rng = random.Random(1)
    requests = [
        (rng.choices(range(10, 700), k=12_000 if offline else 200), offline)
        for offline in [True] * 12 + [False] * 60
    ]

    def params_of(offline: bool, marked: bool) -> dict[str, Any]:
        return params(output_tokens if offline else 8, offline=offline and marked)

    alone = [
        engine.generate(input_ids=ids, sampling_params=params_of(offline, False))["output_ids"]
        for ids, offline in requests
    ]
    assert is_flushed(engine)

    async def one(i: int) -> Any:
        ids, offline = requests[i]
        if not offline:
            await asyncio.sleep(0.05 + 0.02 * (i - 12) + 0.02 * rng.random())
        return await engine.async_generate(input_ids=ids, sampling_params=params_of(offline, True))

    async def together() -> list[Any]:
        work = asyncio.gather(*map(one, range(len(requests))))
        return await asyncio.wait_for(work, TIMEOUT_S)

    outputs = engine.loop.run_until_complete(together())
    assert [output["output_ids"] for output in outputs] == alone
    states = engine.loop.run_until_complete(engine.tokenizer_manager.get_internal_state())
    assert is_flushed(engine)
    return states[0]["coserve"]["safepoints"]


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
@pytest.mark.parametrize("graphs", GRAPHS)
def test_outputs_are_equal_wherever_steps_stop(start: Any, graphs: str, overlap: bool) -> None:
    engine = start(disable_overlap_schedule=not overlap, **GRAPHS[graphs])
    state = run_both_classes(engine, output_tokens=4)
    assert state["enabled"], state
    assert state["resumed"] > 3, state


def test_decode_steps_in_groups_are_suspended(start: Any) -> None:
    engine = start({"safepoint_decode_graphs": True})
    state = run_both_classes(engine, output_tokens=600)
    assert state["suspended"]["decode"] > 0, state


def test_decode_steps_in_one_graph_are_not(start: Any) -> None:
    state = run_both_classes(start(), output_tokens=300)
    assert state["suspended"]["decode"] == 0, state
    assert any("single CUDA graph" in reason for reason in state["kept"]), state
