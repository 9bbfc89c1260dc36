"""A recording replayed gives the same plans, also after a way through a file."""

from __future__ import annotations

import gc
import inspect
import json
import random
import types
from collections import abc
from dataclasses import replace
from enum import Enum
from itertools import pairwise
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
from sglang_coserve.core.latency_model.linear import HYGEN, LinearModel
from sglang_coserve.core.latency_model.profile import LatencyProfile
from sglang_coserve.core.offline_queue import QueuedRequest, pack_tokens
from sglang_coserve.core.policies import POLICIES
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.scheduler import Scheduler
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.core.snapshot import Request, RequestInfo
from sglang_coserve.core.step import (
    PrefillChunk,
    Retraction,
    ServedRequest,
    StepPlan,
    StepResult,
)
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.errors import InputFileError
from sglang_coserve.metrics import SloTargets
from sglang_coserve.recording.calls import (
    Arrived,
    Event,
    Finished,
    OfflineAdded,
    Planned,
    RecordingScheduler,
    Restored,
    SchedulerSetup,
    Started,
    Updated,
    replay,
)
from sglang_coserve.recording.file import VERSION, EventEncoder, encode_setup, read_recording

STEP = StepStats(decode_requests=1)
PROFILE = LatencyProfile(MODEL, None, "h100", "llama-3.1-8b", 1, "0.5.17")


def setup(
    policy: str = "coserve", targets: SloTargets | None = None, **config: Any
) -> SchedulerSetup:
    return SchedulerSetup(
        policy, deadlines(targets or SloTargets(1.0, 0.1)), SchedulerConfig(**config), PROFILE
    )


def lines_of(made_of: SchedulerSetup, events: list[Event]) -> list[str]:
    encoder = EventEncoder()
    return [encode_setup(made_of), *map(encoder.encode, events)]


def read(lines: list[str]) -> tuple[SchedulerSetup, list[Event]]:
    made_of, events = read_recording(lines, "plans.jsonl")
    return made_of, list(events)


# --- Random traffic -----------------------------------------------------------------------


class RecordedMachine(SchedulerMachine):
    """The same arbitrary traffic; in the end all that the scheduler was told is replayed."""

    def scheduler_of(self, config: SchedulerConfig, slo: SloTargets) -> Scheduler:
        config = replace(config, refine=True)
        self.setup_made_of = SchedulerSetup(self.policy, deadlines(slo), config, PROFILE)
        self.events: list[Event] = []
        return RecordingScheduler(self.setup_made_of.make(), self.events.append)

    def teardown(self) -> None:
        if not hasattr(self, "events"):
            return
        super().teardown()
        made_of, events = read(lines_of(self.setup_made_of, self.events))
        assert made_of == self.setup_made_of
        assert events == self.events
        for replayed in replay(events, made_of.make()):
            assert replayed.recorded == replayed.replayed
            assert not replayed.differences


@pytest.mark.parametrize("policy", POLICIES)
def test_random_traffic_replays_to_the_same_plans(policy: str) -> None:
    machine = type(f"Recorded_{policy}", (RecordedMachine,), {"policy": policy})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=15, stateful_step_count=20, deadline=None)
    )


# --- Any event ----------------------------------------------------------------------------

finite = st.floats(allow_nan=False, allow_infinity=False)
names = st.text(max_size=8)
queued_requests = st.builds(
    QueuedRequest,
    rid=names,
    token_ids=st.lists(st.integers(0, 2**32 - 1), min_size=1).map(pack_tokens),
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

events_of_every_kind = anything(Event)


@settings(deadline=None)
@given(st.lists(events_of_every_kind, max_size=12))
def test_every_event_survives_the_way_through_a_file(events: list[Event]) -> None:
    lines = lines_of(setup(), events)
    assert all(line.endswith("\n") and line.isascii() for line in lines)
    assert read(lines)[1] == events


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
)
def test_the_setup_survives_the_way_through_a_file(
    config: SchedulerConfig, slos: tuple[Slo, ...], engine: EngineSize
) -> None:
    profile = replace(
        PROFILE, latency_model=LinearModel.of(HYGEN, prefill_token_s=0.1, iteration_s=1 / 3)
    )
    made_of = SchedulerSetup("hygen", slos, config, profile, engine)
    assert read([encode_setup(made_of)]) == (made_of, [])


def test_a_snapshot_of_64_requests_is_small() -> None:
    rng = random.Random(0)
    decodes = [
        offline(
            rng.randint(100, 4000),
            rid=f"{rng.getrandbits(128):032x}",
            generated=rng.randint(1, 400),
            last_token_s=12345.678901234567,
        )
        for _ in range(64)
    ]
    planned = Planned(snapshot(*decodes), {}, StepPlan())
    encoder = EventEncoder()
    encoder.encode(planned)
    assert len(encoder.encode(planned)) < 64 * 64


def test_a_reader_forgets_requests_that_have_ended() -> None:
    """Of 60 names half come again without an end, with another request behind them."""

    def num_infos() -> int:
        return sum(isinstance(each, RequestInfo) for each in gc.get_objects())

    encoder = EventEncoder()
    lines = [encode_setup(setup())]
    for number in range(90):
        rid = f"r{number % 60}"
        info = online(5, rid=rid, arrival_s=number).info
        late = (ServedRequest(online(5, rid=f"{rid} has ended").info, 1.0),)
        events = [
            Arrived(info),
            Planned(snapshot(Request(info, RequestState.DECODING, 1, 5)), {}, StepPlan()),
            Updated(StepResult(0, 0.0, 0.1, STEP, served=late)),
            *([Finished(rid)] if number >= 30 else []),
        ]
        lines += map(encoder.encode, events)
    _, read_events = read_recording(lines, "plans.jsonl")
    before = num_infos()
    for _ in lines[2:]:  # Not the last: the reader is at work.
        next(read_events)
    assert num_infos() - before < 5
    assert next(read_events) == Finished("r29")


# --- Recording ----------------------------------------------------------------------------


def test_a_recording_scheduler_records_every_method_of_a_scheduler() -> None:
    def interface(kind: type) -> dict[str, object]:
        return {
            name: inspect.signature(member)
            for name, member in vars(kind).items()
            if callable(member) and not name.startswith("_")
        }

    calls = interface(Scheduler)
    del calls["must_suspend"]  # It changes nothing, and no plan depends on its answer.
    assert interface(RecordingScheduler) == calls


def test_a_call_that_fails_is_not_recorded() -> None:
    events: list[Event] = []
    recording = RecordingScheduler(setup().make(), events.append)
    request = queued(10)
    recording.add_offline(request)
    with pytest.raises(Exception, match="already queued"):
        recording.add_offline(request)
    with pytest.raises(Exception, match="never came"):
        recording.restore("nobody", 0)
    assert events == [OfflineAdded(request)]
    waiting = recording.queue.peek(0.0)
    assert waiting is not None and waiting.rid == request.rid
    assert recording.model == MODEL


class BrokenCache(Cache):
    def cached_tokens(self, rid: str) -> int | None:
        raise LookupError(rid)


def test_what_a_plan_that_fails_is_made_from_is_recorded() -> None:
    events: list[Event] = []
    recording = RecordingScheduler(setup().make(), events.append)
    recording.add_offline(queued(10))
    with pytest.raises(LookupError):
        recording.plan(snapshot(), BrokenCache({}))
    assert events[1:] == [Planned(snapshot(), {}, StepPlan())]


# --- Replaying ----------------------------------------------------------------------------


def recorded_evening() -> tuple[SchedulerSetup, list[Event]]:
    """Three offline prompts, of which the first is cached, beside an online decode."""
    made_of = setup()
    events: list[Event] = []
    recording = RecordingScheduler(made_of.make(), events.append)
    for number in range(3):
        recording.add_offline(queued(400, rid=f"q{number}", arrival_s=number, first=number * 1000))
    decode = online(100, RequestState.DECODING, rid="on")
    for cache in (Cache({"q0": 300}), NO_CACHE):
        seen = snapshot(decode, max_batch_tokens=600)
        ran(recording, recording.plan(seen, cache), seen)  # type: ignore[arg-type]
    recording.finish("on")
    return made_of, events


def test_the_answers_of_the_prefix_cache_are_part_of_the_recording() -> None:
    made_of, events = recorded_evening()
    first = next(event for event in events if isinstance(event, Planned))
    assert dict(first.plan.prefills)["q0"] == 100
    assert first.cached_tokens["q0"] == 300
    assert not any(replayed.differences for replayed in replay(events, made_of.make()))
    forgotten = [changed(e, cached_tokens={}) if e is first else e for e in events]
    replayed = next(iter(replay(forgotten, made_of.make())))
    assert {"prefills", "batch"} <= set(replayed.differences)


def test_a_plan_that_differs_is_named_with_its_fields() -> None:
    made_of, events = recorded_evening()
    slower = replace(made_of, slos=deadlines(SloTargets(ttft_s=1.0, tpot_s=0.03)))
    replays = list(replay(events, slower.make()))
    assert [replayed.index for replayed in replays] == [0, 1]
    assert "prefills" in replays[0].differences
    assert replays[0].recorded == next(e.plan for e in events if isinstance(e, Planned))
    assert replays[0].replayed.batch.prefill_tokens < replays[0].recorded.batch.prefill_tokens


def test_rounding_is_no_difference_in_a_time_but_a_token_is_one() -> None:
    made_of, events = recorded_evening()
    for factor, differences in ((1 + 1e-12, ()), (1 + 1e-6, ("predicted_s",))):
        rounded = [
            changed(e, plan=replace(e.plan, predicted_s=e.plan.predicted_s * factor))
            if isinstance(e, Planned)
            else e
            for e in events
        ]
        assert {r.differences for r in replay(rounded, made_of.make())} == {differences}


# --- Lines that are not as they were written ----------------------------------------------


def all_lines() -> list[str]:
    made_of, events = recorded_evening()
    served = (ServedRequest(online(10, rid="z").info, 1.5),)
    events += [Updated(StepResult(2, 0.5, 0.5, STEP, served=served)), Restored("q0", 3)]
    plan = StepPlan(retract=(Retraction("q0", 3),), online_part_s=0.5, is_deadline_bound=True)
    plan = replace(plan, added_s=0.25, waits_online=True)
    events += [Planned(snapshot(online(5)), {}, plan), Started((PrefillChunk("q0", 3),))]
    return lines_of(made_of, events)


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
    for number, line in enumerate(lines):
        for path in leaves(json.loads(line)):
            document = json.loads(line)
            node = document
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = {"a": True}
            bad = [*lines[:number], json.dumps(document) + "\n", *lines[number + 1 :]]
            with pytest.raises(InputFileError, match=rf"^plans\.jsonl:{number + 1}: .*{path[0]}"):
                read(bad)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "not valid JSON"),
        ('{"event":"vanished"}', "event: Invalid value 'vanished'"),
        ('{"event":"finished","rid":"a","why":"b"}', "Object contains unknown field `why`"),
        (
            '{"event":"updated","new":[],"result":{"step":1,"started_s":1},"served":[[9,0]]}',
            "it refers to what is not there: 9",
        ),
        (
            '{"event":"added","request":{"rid":"a","token_ids":"","arrival_s":0,'
            '"max_new_tokens":1}}',
            "offline request 'a' cannot be queued: its prompt has no tokens",
        ),
        (
            '{"event":"added","request":{"rid":"a","token_ids":"AAAAAA==","arrival_s":0,'
            '"max_new_tokens":1}}',
            "request.token_ids: 4 bytes are no tokens",
        ),
    ],
)
def test_a_malformed_line_is_refused_by_number(line: str, message: str) -> None:
    with pytest.raises(InputFileError, match=rf"^plans\.jsonl:2: .*{message}"):
        read([encode_setup(setup()), line + "\n"])


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
        read([json.dumps(header) + "\n"])


def test_a_recording_broken_off_at_any_place_is_read_up_to_there() -> None:
    lines = all_lines()
    whole = read(lines)[1]
    text = "".join(lines)
    ends = [0, *(i + 1 for i, letter in enumerate(text) if letter == "\n")]
    for number, (start, end) in enumerate(pairwise(ends)):
        for cut in (start, (start + end) // 2, end - 1):
            kept = text[:cut].splitlines(keepends=True)
            if number == 0:
                with pytest.raises(InputFileError, match=r"^plans\.jsonl: nothing is recorded"):
                    read(kept)
            else:
                assert read(kept)[1] == whole[: number - 1]
