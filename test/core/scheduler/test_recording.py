"""A recording replayed gives the same plans, also after a way through a file."""

from __future__ import annotations

import inspect
import json
import random
import types
from collections import abc
from dataclasses import replace
from enum import Enum
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from msgspec.structs import replace as changed

from core.scheduler.scenarios import MODEL, NO_CACHE, Cache, offline, online, queued, ran, snapshot
from core.scheduler.test_scheduler_machine import SchedulerMachine
from sglang_coserve.core.control.baseline import EngineSize
from sglang_coserve.core.control.slo import Slo, deadlines, parse_slo
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.core.offline_queue import PackedTokens, QueuedRequest, pack_tokens
from sglang_coserve.core.policies import POLICIES
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.step import (
    PrefillChunk,
    Retraction,
    ServedRequest,
    StepPlan,
    StepResult,
)
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.errors import InputFileError
from sglang_coserve.latency_profile import LatencyProfile
from sglang_coserve.metrics import SloTargets
from sglang_coserve.recording.calls import (
    Call,
    Finished,
    Flushed,
    OfflineAdded,
    Planned,
    RecordedStep,
    RecordingScheduler,
    Restored,
    SchedulerSetup,
    Started,
    Updated,
    replay,
)
from sglang_coserve.recording.file import VERSION, encode_setup, encode_step, read_recording

STEP = StepStats(decode_requests=1)
PROFILE = LatencyProfile(MODEL, None, "h100", "llama-3.1-8b", 1, "0.5.17")


def setup(
    policy: str = "coserve", targets: SloTargets | None = None, **config: Any
) -> SchedulerSetup:
    return SchedulerSetup(
        policy, deadlines(targets or SloTargets(1.0, 0.1)), SchedulerConfig(**config), PROFILE
    )


def lines_of(made_of: SchedulerSetup, steps: list[RecordedStep]) -> list[bytes]:
    return [encode_setup(made_of), *map(encode_step, steps)]


def read(lines: list[bytes]) -> tuple[SchedulerSetup, list[RecordedStep]]:
    made_of, steps = read_recording(lines, "plans.jsonl")
    return made_of, list(steps)


# --- Random traffic -----------------------------------------------------------------------


class RecordedMachine(SchedulerMachine):
    """The same arbitrary traffic; in the end all recorded plans are made again."""

    def scheduler_of(self, config: SchedulerConfig, slo: SloTargets) -> Scheduler:
        config = replace(config, refine=True)
        self.setup_made_of = SchedulerSetup(self.policy, deadlines(slo), config, PROFILE)
        self.steps: list[RecordedStep] = []
        return RecordingScheduler(self.setup_made_of.make(), self.steps.append)

    def teardown(self) -> None:
        if not hasattr(self, "steps"):
            return
        super().teardown()
        made_of, steps = read(lines_of(self.setup_made_of, self.steps))
        assert made_of == self.setup_made_of
        assert steps == self.steps
        for replayed in replay(steps, made_of.make()):
            assert replayed.recorded == replayed.replayed
            assert not replayed.differences


@pytest.mark.parametrize("policy", POLICIES)
def test_random_traffic_replays_to_the_same_plans(policy: str) -> None:
    machine = type(f"Recorded_{policy}", (RecordedMachine,), {"policy": policy})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=15, stateful_step_count=20, deadline=None)
    )


# --- Any step -----------------------------------------------------------------------------

finite = st.floats(allow_nan=False, allow_infinity=False)
names = st.text(max_size=8)
token_ids = st.integers(0, 2**32 - 1)
queued_requests = st.builds(
    QueuedRequest,
    rid=names,
    token_ids=st.lists(token_ids, min_size=1).map(pack_tokens),
    arrival_s=finite,
    max_new_tokens=st.integers(min_value=0),
    num_generated_tokens=st.integers(min_value=0),
    deadline_s=st.none() | finite,
    estimated_service_s=st.floats(0, 1e300),
)
SIMPLE = {
    float: finite,
    int: st.integers(),
    str: names,
    bool: st.booleans(),
    NoneType: st.none(),
    PackedTokens: st.lists(token_ids).map(pack_tokens),
    QueuedRequest: queued_requests,
}


def anything(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type; every field of a dataclass gets one, also where it has a default."""
    arguments = get_args(kind)
    match get_origin(kind):
        case None if kind in SIMPLE:
            return SIMPLE[kind]
        case None if issubclass(kind, Enum):
            return st.sampled_from(kind)
        case None:
            hints = get_type_hints(kind)
            values = {name: anything(hint) for name, hint in hints.items()}
            if kind is StepPlan:  # Its bounds are infinite where there is none.
                values |= dict.fromkeys(("until_s", "budget_s"), finite | st.just(float("inf")))
            return st.builds(kind, **values)
        case types.UnionType:
            return st.one_of(*map(anything, arguments))
        case abc.Mapping:
            return st.dictionaries(*map(anything, arguments), max_size=4)
        case origin:
            few = st.lists(anything(arguments[0]), max_size=4)
            return few if origin is abc.Sequence else few.map(origin)


SLOS = [parse_slo(text) for text in ("ttft p99 <= 300ms", "tbt p99 <= +10%", "tpot mean <= +0%")]

steps_of_every_kind = st.builds(
    RecordedStep, st.lists(anything(Call), max_size=4).map(tuple), st.none() | anything(Planned)
)


@settings(deadline=None)
@given(st.lists(steps_of_every_kind, max_size=4))
def test_every_step_survives_the_way_through_a_file(steps: list[RecordedStep]) -> None:
    lines = lines_of(setup(), steps)
    assert all(line.index(b"\n") == len(line) - 1 for line in lines)
    assert read(lines)[1] == steps


@given(
    st.builds(
        SchedulerConfig,
        iteration_budget_s=st.none() | st.floats(0, exclude_min=True, allow_infinity=False),
        headroom_tokens=st.integers(0),
        refine=st.booleans(),
        seed=st.integers(),
    ),
    st.lists(st.sampled_from(SLOS)).map(tuple),
    anything(EngineSize),
    st.fixed_dictionaries(
        {}, optional={"step_prefill_tokens": st.integers(1), "utility_ratio": st.floats(0, 1)}
    ),
)
def test_the_setup_survives_the_way_through_a_file(
    config: SchedulerConfig, slos: tuple[Slo, ...], engine: EngineSize, policy: dict[str, float]
) -> None:
    profile = replace(
        PROFILE, latency_model=PolynomialModel.of(compute_token_s=0.1, iteration_s=1 / 3)
    )
    made_of = SchedulerSetup("hygen", slos, config, profile, engine, policy)
    assert read([encode_setup(made_of)]) == (made_of, [])


def test_a_snapshot_of_64_requests_is_small() -> None:
    rng = random.Random(0)
    decodes = [
        offline(
            rng.randint(100, 4000),
            rid=f"{rng.getrandbits(128):032x}",
            generated=rng.randint(1, 400),
            first_token_s=12345.678901234567,
            last_token_s=12345.678901234567,
        )
        for _ in range(64)
    ]
    planned = Planned(snapshot(*decodes), {}, StepPlan())
    assert len(encode_step(RecordedStep((), planned))) < 64 * 176


# --- Recording ----------------------------------------------------------------------------


def test_a_recording_scheduler_records_every_method_of_a_scheduler() -> None:
    def interface(kind: type) -> dict[str, object]:
        return {
            name: inspect.signature(member)
            for name, member in vars(kind).items()
            if callable(member) and not name.startswith("_")
        }

    calls = interface(Scheduler)
    for asked in ("must_suspend", "online_lease_s", "protection"):
        del calls[asked]  # It changes nothing, and no plan depends on its answer.
    assert interface(RecordingScheduler) == calls


def test_a_call_that_fails_is_not_recorded() -> None:
    steps: list[RecordedStep] = []
    recording = RecordingScheduler(setup().make(), steps.append)
    request = queued(10)
    recording.add_offline(request)
    with pytest.raises(Exception, match="already queued"):
        recording.add_offline(request)
    with pytest.raises(Exception, match="never came"):
        recording.restore("nobody", 0)
    waiting = recording.queue.peek(0.0)
    assert waiting is not None and waiting.rid == request.rid
    assert recording.model == MODEL
    recording.plan(snapshot(), NO_CACHE)
    assert [step.calls for step in steps] == [(OfflineAdded(request),)]


def test_a_plan_or_a_result_without_a_plan_ends_a_step() -> None:
    """Calls are kept in memory only until then, however long no plan is made."""
    steps: list[RecordedStep] = []
    recording = RecordingScheduler(setup().make(), steps.append)
    recording.flushed()
    seen = snapshot(offline(10))
    plan = recording.plan(seen, NO_CACHE)
    result = ran(recording, plan, seen)
    assert steps == [RecordedStep((Flushed(),), Planned(seen, {}, plan))]
    unplanned = StepResult(None, 1.0, 0.5, STEP)
    recording.update(unplanned)
    recording.update(unplanned)
    calls = (Started(plan.prefills), Updated(result), Updated(unplanned))
    assert steps[1:] == [RecordedStep(calls), RecordedStep((Updated(unplanned),))]


class BrokenCache(Cache):
    def cached_tokens(self, rid: str) -> int | None:
        raise LookupError(rid)


def test_the_input_of_a_plan_that_fails_is_recorded() -> None:
    steps: list[RecordedStep] = []
    recording = RecordingScheduler(setup().make(), steps.append)
    recording.add_offline(queued(10))
    with pytest.raises(LookupError):
        recording.plan(snapshot(), BrokenCache({}))
    assert [step.planned for step in steps] == [Planned(snapshot(), {}, StepPlan())]


# --- Replaying ----------------------------------------------------------------------------


def recorded_evening() -> tuple[SchedulerSetup, list[RecordedStep]]:
    """Three offline prompts, of which the first is cached, beside an online decode."""
    made_of = setup()
    steps: list[RecordedStep] = []
    recording = RecordingScheduler(made_of.make(), steps.append)
    for number in range(3):
        recording.add_offline(queued(400, rid=f"q{number}", arrival_s=number, first=number * 1000))
    decode = online(100, RequestState.DECODING, rid="on")
    for cache in (Cache({"q0": 300}), NO_CACHE):
        seen = snapshot(decode, max_batch_tokens=600)
        ran(recording, recording.plan(seen, cache), seen)  # type: ignore[arg-type]
    recording.finish("on")
    recording.update(StepResult(None, 1.0))
    return made_of, steps


def planned_of(step: RecordedStep) -> Planned:
    assert step.planned is not None
    return step.planned


def test_the_answers_of_the_prefix_cache_are_part_of_the_recording() -> None:
    made_of, steps = recorded_evening()
    first = planned_of(steps[0])
    assert dict(first.plan.prefills)["q0"] == 100
    assert first.cached_tokens["q0"] == 300
    assert not any(replayed.differences for replayed in replay(steps, made_of.make()))
    steps[0] = changed(steps[0], planned=changed(first, cached_tokens={}))
    replayed = next(iter(replay(steps, made_of.make())))
    assert {"prefills", "batch"} <= set(replayed.differences)


def test_a_plan_that_differs_is_named_with_its_fields() -> None:
    made_of, steps = recorded_evening()
    slower = replace(made_of, slos=deadlines(SloTargets(ttft_s=1.0, tpot_s=0.03)))
    replays = list(replay(steps, slower.make()))
    assert [replayed.index for replayed in replays] == [0, 1]
    assert "prefills" in replays[0].differences
    assert replays[0].recorded == planned_of(steps[0]).plan
    assert replays[0].replayed.batch.prefill_tokens < replays[0].recorded.batch.prefill_tokens


def test_rounding_is_no_difference_in_a_time_but_a_token_is_one() -> None:
    made_of, steps = recorded_evening()

    def rounded(step: RecordedStep, factor: float) -> RecordedStep:
        if step.planned is None:
            return step
        plan = step.planned.plan
        plan = replace(plan, predicted_s=plan.predicted_s * factor)
        return changed(step, planned=changed(step.planned, plan=plan))

    for factor, differences in ((1 + 1e-12, ()), (1 + 1e-6, ("predicted_s",))):
        replays = replay([rounded(step, factor) for step in steps], made_of.make())
        assert {replayed.differences for replayed in replays} == {differences}


# --- Lines that are not as they were written ----------------------------------------------


def all_lines() -> list[bytes]:
    made_of, steps = recorded_evening()
    served = (ServedRequest(online(10, rid="z").info, 1.5),)
    calls = Updated(StepResult(2, 0.5, 0.5, STEP, served=served)), Restored("q0", 3)
    plan = StepPlan(retract=(Retraction("q0", 3),), online_part_s=0.5, is_deadline_bound=True)
    plan = replace(plan, added_s=0.25, waits_online=True)
    steps += [
        RecordedStep(calls, Planned(snapshot(online(5)), {}, plan)),
        RecordedStep((Started((PrefillChunk("q0", 3),)), Finished("q0"))),
    ]
    return lines_of(made_of, steps)


def leaves(node: object) -> list[list[Any]]:
    if isinstance(node, dict) and node:
        children = list(node.items())
    elif isinstance(node, list) and node:
        children = list(enumerate(node))
    else:
        return [[]]
    return [[key, *path] for key, child in children for path in leaves(child)]


def test_every_wrong_value_is_refused_with_its_line() -> None:
    lines = all_lines()
    assert len(read(lines)[1]) == len(lines) - 1
    for number, good in enumerate(lines):
        for path in leaves(json.loads(good)):
            document = json.loads(good)
            node = document
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = {"a": True}
            line = json.dumps(document).encode() + b"\n"
            bad = [*lines[:number], line, *lines[number + 1 :]]
            with pytest.raises(InputFileError, match=rf"^plans\.jsonl:{number + 1}: .*{path[0]}"):
                read(bad)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "not valid JSON"),
        ("{}", "missing required field `calls`"),
        ('{"calls":[{"call":"vanished"}]}', r"calls\[0\].call: Invalid value 'vanished'"),
        (
            '{"calls":[{"call":"finished","rid":"a","why":"b"}]}',
            r"calls\[0\]: Object contains unknown field `why`",
        ),
        (
            '{"calls":[{"call":"added","request":{"rid":"a","token_ids":"","arrival_s":0,'
            '"max_new_tokens":1}}]}',
            "offline request 'a' cannot be queued: its prompt has no tokens",
        ),
        (
            '{"calls":[{"call":"added","request":{"rid":"a","token_ids":"AAAAAA==","arrival_s":0,'
            '"max_new_tokens":1}}]}',
            "token_ids: 4 bytes are no tokens",
        ),
    ],
)
def test_a_malformed_line_is_refused_by_number(line: str, message: str) -> None:
    with pytest.raises(InputFileError, match=rf"^plans\.jsonl:2: .*{message}"):
        read([encode_setup(setup()), line.encode() + b"\n"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "csv"}, "format: expected 'coserve plans'"),
        ({"version": VERSION - 1}, f"version: {VERSION - 1} is not {VERSION}, .* record again"),
        ({"config": {"headroom_tokens": -1}}, "scheduler: headroom_tokens must be"),
        ({"profile": {}}, "profile: schema_version: this field is missing"),
    ],
)
def test_a_first_line_that_cannot_be_used_is_refused(
    changes: dict[str, object], message: str
) -> None:
    header = json.loads(encode_setup(setup())) | changes
    with pytest.raises(InputFileError, match=rf"^plans\.jsonl:1: {message}"):
        read([json.dumps(header).encode() + b"\n"])


def test_a_recording_cut_off_at_any_place_is_read_up_to_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = all_lines()
    steps = read(lines)[1]
    for number, line in enumerate(lines):
        for end in (0, len(line) // 2, len(line) - 1):
            caplog.clear()
            cut = [*lines[:number], *([line[:end]] if end else [])]
            if number == 0:
                with pytest.raises(InputFileError, match=r"^plans\.jsonl: nothing is recorded"):
                    read(cut)
                continue
            assert read(cut)[1] == steps[: number - 1]
            warning = f"plans.jsonl:{number + 1}: the last line is cut off, and is left out"
            assert caplog.messages == ([warning] if end else [])
