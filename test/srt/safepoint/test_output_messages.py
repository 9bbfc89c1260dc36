"""All that answers hold is the same with suspensions, or there are no safepoints."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from sglang_coserve.srt.safepoint import safepoints
from sglang_coserve.srt.safepoint.instrument import decoder_layers
from srt.safepoint.modes import SUSPENDING
from srt.safepoint.random_suspensions import suspensions_of
from srt.safepoint.test_eligibility import Changed
from srt.scripted_engine import ScriptedEngine

OF_THE_ROUND = {"time_stats", "token_steps", "retraction_counts", "cached_tokens_details"}
"""Fields that say when a token came, not which."""

ENGINE = {
    "max_total_tokens": 8192,
    "chunked_prefill_size": 1024,
    "enable_return_hidden_states": True,
    "coserve": {**SUSPENDING, "slo_ttft_ms": 10_000.0, "slo_tpot_ms": 1_000.0},
}

NAMES = [f"off{number}" for number in range(6)]


def with_all_outputs(engine: ScriptedEngine, rid: str, seed: int) -> Any:
    """An offline request that asks for every output that safepoints do not exclude."""
    draw = random.Random(seed)
    prompt = [draw.randrange(3, 900) for _ in range(120)]
    request = engine.request(rid, prompt, 5, True)
    excluded = {"return_routed_experts", "return_indexer_topk"}
    for name in dir(request):
        if name.startswith("return_") and name not in excluded:
            setattr(request, name, True)
    request.logprob_start_len, request.top_logprobs_num = 0, 2
    request.token_ids_logprob = [5, 6]
    return request


def plain(value: Any) -> Any:
    """The value in lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if hasattr(value, "__struct_fields__"):
        value = [getattr(value, name) for name in value.__struct_fields__]
    if is_dataclass(value):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def is_same(value: Any, other: Any) -> bool:
    """Numbers may differ a little: other batches round otherwise."""
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(is_same, value, other))
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, abs_tol=1e-3)
    return bool(value == other)


def run(engine: ScriptedEngine, probability: float) -> dict[str, dict[str, Any]]:
    """Return by request what the messages of its answer hold."""
    found: dict[str, dict[str, Any]] = {rid: {} for rid in NAMES}

    def keep(message: Any, *_: Any) -> None:
        for place, rid in enumerate(message.rids):
            if rid not in found:
                continue
            for name in set(dir(message)) - OF_THE_ROUND:
                of_all = getattr(message, name)
                if isinstance(of_all, list) and len(of_all) == len(message.rids):
                    value = plain(of_all[place])
                    if name == "output_hidden_states":
                        # SGLang has those of the last piece of a prompt, which plans may cut.
                        value[0] = value[0][-1:]
                    found[rid].setdefault(name, []).append(value)

    def script(iteration: int) -> Iterable[Any]:
        if iteration > 60:
            raise StopIteration
        messages = []
        if iteration % 8 == 0 and iteration < 48:
            number = iteration // 8
            messages.append(with_all_outputs(engine, NAMES[number], number))
        if iteration % 3 == 1:
            messages.append(engine.request(f"on{iteration}", [7 + iteration] * 150, 2))
        return messages

    stops = suspensions_of(engine)
    with pytest.MonkeyPatch.context() as patch, stops.stopping(3, probability):
        channel = engine.scheduler.ipc_channels.send_to_detokenizer
        patch.setattr(channel, "send_output", keep)
        engine.run(script)
    engine.assert_nothing_leaked()
    return found


def run_twice(engine: ScriptedEngine) -> tuple[list[dict[str, dict[str, Any]]], int]:
    alone = run(engine, 0.0)
    before = engine.scheduler.parts.lane.safepoints.stats.suspensions.total()
    stopped = run(engine, 0.9)
    stats = engine.scheduler.parts.lane.safepoints.stats
    return [alone, stopped], stats.suspensions.total() - before


def test_answers_hold_the_same_whether_steps_were_suspended_or_not(start_engine: Any) -> None:
    engine = start_engine(**ENGINE)
    (alone, stopped), num_suspended = engine.call(run_twice)
    assert num_suspended > 0
    for rid in NAMES:
        for name in alone[rid]:
            assert is_same(stopped[rid][name], alone[rid][name]), f"{name} of {rid}"
    given = {name for name, values in alone[NAMES[0]].items() if values[-1]}
    assert {
        "output_hidden_states",
        "input_token_logprobs_val",
        "output_token_logprobs_val",
    } <= given


def outputs_without_safepoints(engine: ScriptedEngine) -> dict[str, str | None]:
    scheduler = engine.scheduler
    layers = decoder_layers(scheduler.tp_worker.model_runner.model)
    args = scheduler.server_args
    names = [name for name in dir(args) if name.startswith("enable_return_")]
    view = safepoints.compat.settings_of(args)
    reasons = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(
                safepoints.compat, "settings_of", lambda _, name=name: Changed(view, **{name: True})
            )
            reasons[name] = safepoints.why_no_safepoints(scheduler, layers)
    return reasons


def test_outputs_gathered_layer_by_layer_exclude_safepoints(start_engine: Any) -> None:
    reasons = start_engine(**ENGINE).call(outputs_without_safepoints)
    assert reasons.pop("enable_return_hidden_states") is None
    assert {"enable_return_routed_experts", "enable_return_indexer_topk"} <= reasons.keys()
    assert all("gathered layer by layer" in str(reason) for reason in reasons.values())


def test_every_output_of_a_pass_was_looked_at() -> None:
    names = {field.name for field in fields(safepoints.ModelRunnerOutput)}
    assert names <= safepoints._PASS_OUTPUTS, "say in _PASS_OUTPUTS whether suspensions keep it"
