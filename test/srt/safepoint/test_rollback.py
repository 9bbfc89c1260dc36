"""Aborted passes leave no trace: the same outputs, nothing leaked, nobody forgotten.

Offline work survives any number of aborts; what cannot be rolled back is never aborted.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_coserve.core.preemption_guard import GuardConfig, PreemptionGuard
from srt import test_scheduler as scenarios
from srt.conftest import Reference
from srt.safepoint.random_aborts import UNLIMITED, aborts_of
from srt.scripted_engine import EngineProcess, ScriptedEngine, Spec

PREEMPTIVE = {
    "offline_policy": "coserve",
    "startup_profile_seconds": 0.0,
    "slo_ttft_ms": 300.0,
    "slo_tpot_ms": 40.0,
    "safepoint_interval": 1,
    "safepoint_mode": "abort",
}

Modes = tuple[bool, int, bool]
"""Overlap, page size, radix cache."""

MODES: dict[str, Modes] = {
    f"{loop}-page{page_size}-{cache}": (loop == "overlap", page_size, cache == "radix")
    for loop in ("normal", "overlap")
    for page_size in (1, 16)
    for cache in ("radix", "chunk")
}
QUICK = ("normal-page1-chunk", "overlap-page16-radix")
"""Each value of each mode once."""


def start(start_engine: Any, modes: Modes, **coserve: Any) -> EngineProcess:
    overlap, page_size, radix = modes
    process = start_engine(
        overlap=overlap,
        page_size=page_size,
        disable_radix_cache=not radix,
        coserve={**PREEMPTIVE, **coserve},
    )
    assert isinstance(process, EngineProcess)
    return process


def run_mixed_with_aborts(
    engine: ScriptedEngine, specs: list[Spec], seed: int, probability: float
) -> tuple[dict[str, list[int]], set[str], dict[str, int], set[int]]:
    aborts = aborts_of(engine)
    before = aborts.counts()
    aborts.start(seed, probability)
    try:
        outputs, aborted, _ = scenarios.run_mixed(engine, specs, seed)
    finally:
        aborts.stop()
    parts = engine.scheduler.parts
    assert not len(parts.ledger)
    assert not len(parts.runner.counted_penalties)
    assert not parts.runner.safepoints.guard._aborts_in_a_row
    counts = {kind: n - before.get(kind, 0) for kind, n in aborts.counts().items()}
    return outputs, aborted, counts, set(aborts.layers)


def check_outputs(
    process: EngineProcess, reference_outputs: Reference, *, seed: int, size: int
) -> None:
    """How many batches of each kind there are depends on how fast the machine is."""
    specs = scenarios.mixed_specs(seed=seed, num_online=size // 2, num_offline=size)
    run = process.call(run_mixed_with_aborts, specs, seed, 0.4)
    outputs, aborted, counts, layers = run
    scenarios.assert_outputs(specs, outputs, aborted, reference_outputs(specs))
    assert sum(counts.values()) >= 2 * size
    assert all(counts.get(kind, 0) for kind in ("extend", "decode", "mixed"))
    assert layers == set(range(6))


@pytest.mark.parametrize("modes", QUICK)
def test_outputs_are_those_of_stock_whatever_is_aborted(
    start_engine: Any, reference_outputs: Reference, modes: str
) -> None:
    """KV is short: rows are evicted, parked and paused between the aborts."""
    process = start(start_engine, MODES[modes])
    check_outputs(process, reference_outputs, seed=21, size=30)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("modes", MODES)
def test_outputs_are_those_of_stock_in_every_mode(
    start_engine: Any, reference_outputs: Reference, modes: str, seed: int
) -> None:
    process = start(start_engine, MODES[modes])
    check_outputs(process, reference_outputs, seed=seed, size=100)


# --- What is not aborted ------------------------------------------------------------------

SPECS: list[Spec] = [(f"off{i}", scenarios.prompt(i, 100 + 50 * i), 8, True) for i in range(4)]


def start_quick(start_engine: Any) -> EngineProcess:
    return start(start_engine, MODES[QUICK[0]])


def run_under_fire(
    engine: ScriptedEngine, config: GuardConfig
) -> tuple[dict[str, list[int]], list[int], dict[str, int]]:
    """Abort every batch that may be aborted; also return the lengths of the series of aborts."""
    aborts = aborts_of(engine)
    safepoints = engine.scheduler.parts.runner.safepoints
    safepoints.guard = PreemptionGuard(config)
    before, kept_before = sum(aborts.counts().values()), dict(safepoints.stats.kept)
    aborts.start(seed=1, probability=1.0)
    series: list[int] = []
    seen = before

    def script(iteration: int) -> list[Any]:
        nonlocal seen
        if iteration == 0:
            return [engine.request(*spec[:3], offline=True) for spec in SPECS]
        now = sum(aborts.counts().values())
        if now > seen and series and iteration > 1:
            series[-1] += 1
        else:
            series.append(int(now > seen))
        seen = now
        if all(spec[0] in engine.reqs and engine.reqs[spec[0]].finished() for spec in SPECS):
            raise StopIteration
        return []

    try:
        engine.run(script)
    finally:
        aborts.stop()
        safepoints.guard = PreemptionGuard(UNLIMITED)
    outputs = {spec[0]: engine.output(spec[0]) for spec in SPECS}
    engine.assert_nothing_leaked()
    kept = {
        reason: n - kept_before.get(reason, 0)
        for reason, n in safepoints.stats.kept.items()
        if n > kept_before.get(reason, 0)
    }
    return outputs, series, kept


def test_a_request_is_aborted_a_bounded_number_of_times_in_a_row(
    start_engine: Any, reference_outputs: Reference
) -> None:
    config = GuardConfig(max_aborts_in_a_row=3, wasted_share=1.0, burst_s=1e9)
    outputs, series, kept = start_quick(start_engine).call(run_under_fire, config)
    assert outputs == reference_outputs(SPECS)
    assert max(series) == 3
    assert set(kept) == {"a request of it was aborted too often in a row"}


def test_aborts_stop_once_they_have_cost_their_share(
    start_engine: Any, reference_outputs: Reference
) -> None:
    config = GuardConfig(max_aborts_in_a_row=10**6, wasted_share=1e-6, burst_s=1e-9)
    outputs, series, kept = start_quick(start_engine).call(run_under_fire, config)
    assert outputs == reference_outputs(SPECS)
    assert sum(series) == 1
    assert set(kept) == {"aborts have cost their share of the time"}


def reasons_against(engine: ScriptedEngine) -> list[str]:
    """Return the reasons for engines like this one, but for one thing each."""
    from sglang_coserve.srt.safepoint.eligibility import why_no_safepoints
    from sglang_coserve.srt.safepoint.layers import decoder_layers

    scheduler = engine.scheduler
    layers = decoder_layers(scheduler.tp_worker.model_runner.model)
    assert why_no_safepoints(scheduler, layers) is None
    found = [why_no_safepoints(scheduler, [])]
    for owner, name, value in (
        (scheduler, "device", "npu"),
        (scheduler.server_args, "enable_torch_compile", True),
        (scheduler, "is_hybrid_swa", True),
        (scheduler, "is_generation", False),
        (scheduler.model_config, "is_encoder_decoder", True),
        (scheduler.ps, "pp_size", 2),
    ):
        kept = getattr(owner, name)
        object.__setattr__(owner, name, value)
        found.append(why_no_safepoints(scheduler, layers))
        object.__setattr__(owner, name, kept)
    assert None not in found
    return [str(reason) for reason in found]


def test_engines_that_cannot_be_rolled_back_are_told_apart(start_engine: Any) -> None:
    reasons = start_quick(start_engine).call(reasons_against)
    assert len(set(reasons)) == len(reasons)
    assert "no list of decoder layers was found in the model" in reasons


def batch_of(hicache_consumer_index: int = -1, **row: Any) -> Any:
    """As much of a batch as the question is about: a plain decode, and one more row."""
    plain = {"session": None, "multimodal_inputs": None, "input_embeds": None}
    reqs = [SimpleNamespace(**{**plain, **row}), SimpleNamespace(**plain)]
    return SimpleNamespace(hicache_consumer_index=hicache_consumer_index, reqs=reqs)


def test_batches_that_cannot_be_rolled_back_are_told_apart() -> None:
    from sglang_coserve.srt.safepoint.eligibility import why_batch_must_end

    something = object()
    assert why_batch_must_end(batch_of(), 1) is None
    # The images and embeddings of a row that decodes have done their part.
    assert why_batch_must_end(batch_of(multimodal_inputs=something), 0) is None
    reasons = {
        why_batch_must_end(batch_of(**values), 1)
        for values in (
            {"hicache_consumer_index": 3},
            {"session": something},
            {"multimodal_inputs": something},
            {"input_embeds": something},
        )
    }
    assert len(reasons) == 4
    assert None not in reasons


def run_without_safepoints(engine: ScriptedEngine) -> tuple[dict[str, list[int]], Any]:
    """Run as an engine does that was told apart at start."""
    parts = engine.scheduler.parts
    safepoints, parts.runner.safepoints = parts.runner.safepoints, None
    parts.runner.why_no_safepoints = "a reason"
    try:
        outputs, _, _ = scenarios.run_mixed(engine, SPECS, 1)
        return outputs, parts.status.state()["safepoints"]
    finally:
        parts.runner.safepoints = safepoints


def test_an_engine_without_safepoints_says_why_and_works(
    start_engine: Any, reference_outputs: Reference
) -> None:
    outputs, state = start_quick(start_engine).call(run_without_safepoints)
    assert outputs == reference_outputs(SPECS)
    assert state == {"enabled": False, "reason": "a reason"}
