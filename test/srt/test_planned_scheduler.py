"""The core's plans on the real scheduler: nothing lost, nothing leaked, the same outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from srt import test_scheduler as scenarios
from srt.conftest import LOOPS_AND_PAGES, Reference
from srt.scripted_engine import EngineProcess, ScriptedEngine, Spec

PLANNED = {"offline_policy": "coserve", "startup_profile_seconds": 0.0}
LOOSE = {**PLANNED, "slo_ttft_ms": 300.0, "slo_tpot_ms": 40.0}

TIGHT = {**PLANNED, "slo_ttft_ms": 300.0, "slo_tpot_ms": 0.01, "safepoint_interval": 0}
"""No machine decodes that fast: offline requests pause whenever an online one decodes. They have no
lane of their own, where they would go on."""


@pytest.fixture(params=LOOPS_AND_PAGES)
def planned(request: pytest.FixtureRequest, start_engine: Any) -> EngineProcess:
    """The default policy, in both event loops and with pages of 1 and 16 tokens."""
    overlap, page_size = request.param
    return start_engine(overlap=overlap, page_size=page_size, coserve=LOOSE)


def test_a_hundred_mixed_requests_finish_with_the_outputs_of_stock(
    planned: EngineProcess, reference_outputs: Reference
) -> None:
    specs = scenarios.mixed_specs(seed=11, num_online=40, num_offline=60)
    outputs, aborted, count = planned.call(scenarios.run_mixed, specs, 5)
    scenarios.assert_outputs(specs, outputs, aborted, reference_outputs(specs))
    assert count["retracted"] > 0


PAUSE_SPECS: list[Spec] = [
    ("on0", scenarios.prompt(1, 100), 20, False),
    ("off0", scenarios.prompt(2, 100), 20, True),
    ("off1", scenarios.prompt(3, 400), 20, True),
]


def run_pause(engine: ScriptedEngine, mode: str, first: int) -> dict[str, list[int]]:
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    engine.run(
        {
            0: [engine.request(*spec) for spec in PAUSE_SPECS],
            first: [PauseGenerationReqInput(mode=mode)],
            first + 4: [ContinueGenerationReqInput()],
            first + 8: [PauseGenerationReqInput(mode=mode)],
            first + 11: [ContinueGenerationReqInput()],
        }
    )
    engine.assert_nothing_leaked()
    return engine.outputs(PAUSE_SPECS)


def test_a_pause_after_any_step_keeps_both_classes_whole(
    planned: EngineProcess, reference_outputs: Reference
) -> None:
    """Whatever ran last: prefills or decodes, of either lane."""
    expected = reference_outputs(PAUSE_SPECS)
    assert planned.call(run_pause, "in_place", 4) == expected
    for first in range(1, 11):
        assert planned.call(run_pause, "retract", first) == expected


def run_abort_in_every_state(engine: ScriptedEngine) -> dict[str, set[str]]:
    """Abort each offline request as soon as it is seen parked or paused."""
    specs: list[Spec] = [(f"off{i}", scenarios.prompt(i, 400), 60, True) for i in range(12)]
    seen: dict[str, set[str]] = {"parked": set(), "paused": set()}

    def script(iteration: int) -> list[Any]:
        if iteration == 0:
            return [engine.request(*spec) for spec in specs]
        if iteration > 400:
            raise StopIteration
        messages = []
        if iteration % 6 == 0:
            tokens = scenarios.prompt(iteration, 150)
            messages.append(engine.request(f"on{iteration}", tokens, 12))
        for state, rids in seen.items():
            reqs = getattr(engine.scheduler.parts.queues.paused_requests, state)
            if fresh := {req.rid for req in reqs} - rids:
                rids.add(min(fresh))
                messages.append(engine.abort(min(fresh)))
        return messages

    engine.run(script)
    engine.assert_nothing_leaked()
    return seen


def run_abort_while_paused(engine: ScriptedEngine, spec: Spec, then: Spec | None) -> list[int]:
    """Pause an offline request beside a stream for good, and abort it.

    Returns the passes from its abort to its end, and the tokens computed for it after the abort.
    """
    parts = engine.scheduler.parts
    plan = parts.admission.core.plan
    stream: Spec = ("on", scenarios.prompt(80, 20), 120, False)
    state: dict[str, int] = {}
    engine.reqs.clear()

    def streams() -> bool:
        req = engine.reqs.get("on")
        return req is not None and len(req.output_ids) > 3 and not req.finished()

    def pausing(*args: Any, **named: Any) -> Any:
        made = plan(*args, **named)
        running = {req.rid for req in engine.scheduler.running_batch.reqs}
        if not streams():
            return made
        return replace(made, resume=(), pause=(spec[0],) if spec[0] in running else ())

    def script(iteration: int) -> list[Any]:
        if iteration == 0:
            return [engine.request(*spec)]
        if iteration == 12:
            return [engine.request(*stream)]
        paused = {req.rid for req in parts.queues.paused_requests.paused}
        if "aborted" not in state and spec[0] in paused:
            state["aborted"] = iteration
            state["passes"] = len(engine.iterations)
            return [engine.abort(spec[0]), *([engine.request(*then)] if then else [])]
        if "aborted" in state and "gone" not in state and spec[0] not in parts.requests:
            state["gone"] = iteration
        if "on" in engine.reqs and engine.reqs["on"].finished():
            raise StopIteration
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts.admission.core, "plan", pausing)
        engine.run(script)
    engine.assert_nothing_leaked()
    after = engine.iterations[state["passes"] + 1 :]
    return [state["gone"] - state["aborted"], sum(spec[0] in one.rids for one in after)]


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
@pytest.mark.parametrize("tokens", [300, 700], ids=["alone", "retracted for memory"])
def test_an_aborted_request_that_is_paused_ends_at_once(
    start_engine: Any, overlap: bool, tokens: int
) -> None:
    process = start_engine(
        overlap=overlap, page_size=16, coserve={**LOOSE, "safepoint_interval": 0}
    )
    spec: Spec = ("off", scenarios.prompt(1, 300), 100, True)
    then: Spec | None = ("large", scenarios.prompt(2, tokens), 4, False) if tokens > 300 else None
    passes, computed = process.call(run_abort_while_paused, spec, then)
    assert passes <= 2
    assert computed == 0


def run_names_used_again(engine: ScriptedEngine, offline: bool) -> list[tuple[bool, list[int]]]:
    """Abort a request in the middle, or let it end, and send another one of its name at once.

    Every other one has penalties, and cannot be paused. Returns for each whether it has, and
    its tokens.
    """
    outputs: list[tuple[bool, list[int]]] = []
    engine.reqs.pop("name", None)

    def script(iteration: int) -> list[Any]:
        if iteration == 0:
            return [engine.request("other", scenarios.prompt(1, 40), 200, not offline)]
        if len(outputs) == 9:
            raise StopIteration  # However long the online request kept an offline one waiting.
        known = engine.reqs.get("name")
        number = len(outputs)
        is_live = known is not None and not known.finished()
        # One in three is given up after some tokens.
        if is_live and (number % 3 or len(known.output_ids) < 5):
            return []
        if known is not None:
            outputs.append((number % 2 == 1, engine.output("name")))
        number = len(outputs)
        sampling = {"frequency_penalty": 0.5, "min_new_tokens": 8} if number % 2 else {}
        again = engine.request("name", scenarios.prompt(7, 30), 12, offline=offline, **sampling)
        return [engine.abort("name"), again] if is_live else [again]

    engine.run(script)
    engine.assert_nothing_leaked()
    return outputs


@pytest.mark.parametrize("offline", [False, True], ids=["online", "offline"])
def test_a_name_may_be_used_again_before_its_request_has_left_the_engine(
    planned: EngineProcess, offline: bool
) -> None:
    outputs = planned.call(run_names_used_again, offline)
    whole = [(penalized, tuple(tokens)) for penalized, tokens in outputs if len(tokens) == 12]
    assert len(outputs) > len(whole) > 2
    assert len(set(whole)) == 2


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
def test_parked_and_paused_requests_can_be_aborted(start_engine: Any, overlap: bool) -> None:
    process = start_engine(overlap=overlap, page_size=16, coserve=TIGHT)
    seen = process.call(run_abort_in_every_state)
    assert seen["parked"]
    assert seen["paused"]


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
def test_requests_that_pause_all_the_time_generate_the_same(
    start_engine: Any, overlap: bool, reference_outputs: Reference
) -> None:
    process = start_engine(overlap=overlap, page_size=16, max_total_tokens=8192, coserve=TIGHT)
    specs = scenarios.mixed_specs(seed=12, num_online=30, num_offline=40)
    outputs, aborted, count = process.call(scenarios.run_mixed, specs, 6)
    scenarios.assert_outputs(specs, outputs, aborted, reference_outputs(specs))
    assert count["paused"] > 0
    assert count["resumed"] > 0


def run_arrival_during_an_offline_prefill(engine: ScriptedEngine) -> list[dict[str, int]]:
    """Return the prefill tokens of each step, by rid."""
    offline = engine.request("off", scenarios.prompt(1, 900), 4, offline=True)
    online = engine.request("on", scenarios.prompt(2, 42), 4)
    late = engine.request("late", scenarios.prompt(3, 37), 4)
    iterations = engine.run({0: [offline], 2: [online, late]})
    engine.assert_nothing_leaked()
    # The requests that decode come last, with one token each.
    return [dict(zip(it.rids, it.extend_lens, strict=False)) for it in iterations if it.is_extend]


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_begun_offline_prompt_goes_on_beside_online_ones(
    start_engine: Any, page_size: int
) -> None:
    relaxed = {**PLANNED, "slo_ttft_ms": 60_000.0, "slo_tpot_ms": 60_000.0}
    engine = start_engine(page_size=page_size, chunked_prefill_size=128, coserve=relaxed)
    chunks = engine.call(run_arrival_during_an_offline_prefill)
    (shared,) = [chunk for chunk in chunks if chunk.get("on", 0) > 1]
    left_tokens = (128 - 42 - 37) // page_size * page_size
    assert shared == {"on": 42, "late": 37, "off": left_tokens}
    assert sum(chunk["off"] for chunk in chunks if chunk.get("off", 0) > 1) == 900


def run_one_at_a_time_with_a_deadline(engine: ScriptedEngine) -> list[str]:
    """Return the offline requests in the order in which they were admitted; the last has one."""
    messages = [
        engine.request(f"off{i}", scenarios.prompt(i, 40), 4, offline=True) for i in range(4)
    ]
    messages[-1].sampling_params.custom_params["coserve_deadline_s"] = 30.0
    iterations = engine.run(messages)
    engine.assert_nothing_leaked()
    return list(dict.fromkeys(rid for it in iterations if it.is_extend for rid in it.rids))


@pytest.mark.parametrize("policy", ["coserve", "hygen"])
def test_an_offline_request_with_a_deadline_goes_first(start_engine: Any, policy: str) -> None:
    one_at_a_time = {**LOOSE, "offline_policy": policy, "offline_max_running": 1}
    admitted = start_engine(coserve=one_at_a_time).call(run_one_at_a_time_with_a_deadline)
    assert sorted(admitted) == ["off0", "off1", "off2", "off3"]
    assert admitted[0] == "off3"


def run_priorities(engine: ScriptedEngine, large: bool) -> tuple[int, list[int]]:
    """An online request of a high priority comes behind 20 others, with offline work there.

    Returns how many of the others begin before it, and its output tokens.
    """
    others = [
        engine.request(f"on{number}", scenarios.prompt(number, 100), 30) for number in range(20)
    ]
    for request in others:
        request.priority = 0
    urgent = engine.request("urgent", scenarios.prompt(90, 700 if large else 100), 3)
    urgent.priority = 100
    offline = engine.request("off", scenarios.prompt(91, 300), 30, True)
    passes = engine.run({0: [*others, offline], 8: [urgent]})
    engine.assert_nothing_leaked()
    order = list(
        dict.fromkeys(rid for one in passes for rid in one.rids if rid.startswith(("on", "u")))
    )
    return order.index("urgent"), engine.output("urgent")


@pytest.mark.parametrize("large", [False, True], ids=["fits", "displaces others"])
@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
def test_priorities_of_online_requests_are_kept_beside_offline_work(
    start_engine: Any, overlap: bool, large: bool
) -> None:
    process = start_engine(
        overlap=overlap,
        coserve={**PLANNED, "slo_ttft_ms": 1000.0},
        enable_priority_scheduling=True,
        max_running_requests=16,
    )
    begun, output = process.call(run_priorities, large)
    assert begun <= 12
    assert len(output) == 3
