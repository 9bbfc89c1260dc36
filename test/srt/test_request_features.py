"""What a request can ask for beside tokens, beside offline ones that pause and are retracted.

Log-probabilities, grammars, LoRA adapters, logit processors and penalties, in both
classes and all in one engine, come out as from stock SGLang, which runs each kind
by itself and with memory for all.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from chaos_bench.adapter import MODULES, RANK, make_adapter
from srt import test_scheduler as scenarios
from srt.safepoint.random_suspensions import suspensions_of
from srt.scripted_engine import EngineProcess, ScriptedEngine
from srt.test_planned_scheduler import LOOSE, TIGHT

ADAPTERS = ("poet", "clerk", "pilot")
PLACES = 3
"""Adapters in one batch: one less than there are, with the bare model."""

SCHEMA = {"type": "array", "items": {"type": "string", "minLength": 4}, "minItems": 30}
REGEX = r"([a-z]{2,8} ){60,90}"

LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2}
PROMPT_LOGPROBS = {**LOGPROBS, "logprob_start_len": 0, "token_ids_logprob": [5, 77]}


def forbid_tokens() -> str:
    """A logit processor that rules out some tokens, as a client sends it."""
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    class ForbidTokens(CustomLogitProcessor):
        def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
            logits[:, 10:400] = float("-inf")
            return logits

    return str(ForbidTokens.to_str())


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "penalties": ({"frequency_penalty": 0.7, "repetition_penalty": 1.1, "min_new_tokens": 5}, {}),
    "logprobs": ({}, LOGPROBS),
    "prompt logprobs": ({}, PROMPT_LOGPROBS),
    "json": ({"json_schema": json.dumps(SCHEMA)}, {}),
    "regex": ({"regex": REGEX}, {}),
    "processor": ({}, {"custom_logit_processor": forbid_tokens}),
    **{name: ({}, {"lora_id": name}) for name in ADAPTERS},
    "several": ({"regex": REGEX}, {**LOGPROBS, "lora_id": "poet"}),
}
"""Sampling parameters and fields of a request, by kind."""


@dataclass(frozen=True)
class Ask:
    """A request of a kind."""

    rid: str
    kind: str
    prompt: list[int]
    max_new_tokens: int
    offline: bool

    def message(self, engine: ScriptedEngine) -> Any:
        """What the scheduler receives."""
        sampling, fields = KINDS[self.kind]
        message = engine.request(
            self.rid, self.prompt, self.max_new_tokens, offline=self.offline, **sampling
        )
        for name, value in fields.items():
            setattr(message, name, value() if callable(value) else value)
        return message


# --- Engines ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter_paths(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        adapter: make_adapter(small_model, tmp_path_factory.mktemp(adapter), seed)
        for seed, adapter in enumerate(ADAPTERS)
    }


def load_adapters(engine: ScriptedEngine, paths: dict[str, Path]) -> None:
    from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

    for name, path in paths.items():
        message = LoadLoRAAdapterReqInput(lora_name=name, lora_path=str(path), lora_id=name)
        loaded = engine.scheduler.load_lora_adapter(message)
        assert loaded.success, loaded.error_message


Start = Callable[..., EngineProcess]


@pytest.fixture(scope="module")
def start(start_engine: Start, adapter_paths: dict[str, Path]) -> Start:
    """Starts engines that know the adapters."""
    ready: set[EngineProcess] = set()

    def start(**settings: Any) -> EngineProcess:
        process = start_engine(
            enable_custom_logit_processor=True,
            enable_lora=True,
            max_lora_rank=RANK,
            lora_target_modules=frozenset(MODULES),
            max_loras_per_batch=PLACES,
            **settings,
        )
        if process not in ready:
            process.call(load_adapters, adapter_paths)
            ready.add(process)
        return process

    return start


def start_tight(start: Start, *, overlap: bool, **coserve: Any) -> EngineProcess:
    page_size = 16 if overlap else 1
    return start(overlap=overlap, page_size=page_size, coserve={**TIGHT, **coserve})


@pytest.fixture(scope="module")
def from_stock(start: Start) -> Callable[[Sequence[Ask]], dict[str, Any]]:
    """Runs requests on stock SGLang, each kind by itself; the same ones only once."""
    known: dict[str, dict[str, Any]] = {}

    def run(asks: Sequence[Ask]) -> dict[str, Any]:
        if repr(asks) not in known:
            stock = start(stock=True, max_total_tokens=65536, chunked_prefill_size=8192)
            known[repr(asks)] = stock.call(run_each_kind_alone, asks)
        return dict(known[repr(asks)])

    return run


# --- What comes out -----------------------------------------------------------------------


def results_of(engine: ScriptedEngine, asks: Sequence[Ask]) -> dict[str, Any]:
    """Tokens, reason of the end and log-probabilities by rid."""
    results = {}
    for ask in asks:
        req = engine.reqs[ask.rid]
        end = type(req.finished_reason).__name__
        results[ask.rid] = (engine.output(ask.rid), end, all_logprobs(req))
    return results


def all_logprobs(req: Any) -> dict[tuple[str, int, int], float]:
    """The log-probabilities that a request gets, by name, position and token.

    Tokens that a grammar rules out are left out: among equals, any may be named.
    """
    found = {}
    for name in ("token_logprobs", "top_logprobs", "token_ids_logprobs"):
        for side in ("input", "output"):
            values = getattr(req.logprob, f"{side}_{name}_val") or ()
            ids = getattr(req.logprob, f"{side}_{name}_idx") or ()
            for position, (value, token) in enumerate(zip(values, ids, strict=True)):
                if value is None:
                    continue  # Nothing predicts a first token.
                pairs = [(token, value)]
                if isinstance(value, list):
                    pairs = list(zip(token, value, strict=True))
                found.update({(f"{side} {name}", position, t): v for t, v in pairs if v > -1e30})
    return found


def assert_same(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal tokens and ends; log-probabilities equal but for rounding."""
    assert ours.keys() == expected.keys()
    for rid, (tokens, end, logprobs) in expected.items():
        assert ours[rid][:2] == (tokens, end), rid
        assert ours[rid][2] == pytest.approx(logprobs, abs=1e-4), rid


def run_each_kind_alone(engine: ScriptedEngine, asks: Sequence[Ask]) -> dict[str, Any]:
    for kind in {ask.kind for ask in asks}:
        of_kind = [replace(ask, offline=False) for ask in asks if ask.kind == kind]
        engine.run([ask.message(engine) for ask in of_kind])
        engine.scheduler.flush_cache()
    return results_of(engine, asks)


def run_script(
    engine: ScriptedEngine, asks: Sequence[Ask], arrivals: Sequence[int]
) -> tuple[dict[str, Any], dict[str, list[int]], dict[str, int]]:
    """Run requests that arrive in these steps.

    Returns the results, the forward passes that each request was in, and counts.
    """
    before = scenarios.counts(engine)

    def script(iteration: int) -> list[Any]:
        if iteration > max(arrivals):
            raise StopIteration
        return [
            ask.message(engine)
            for ask, arrival in zip(asks, arrivals, strict=True)
            if arrival == iteration
        ]

    iterations = engine.run(script)
    engine.assert_nothing_leaked()
    passes: dict[str, list[int]] = {ask.rid: [] for ask in asks}
    for i, iteration in enumerate(iterations):
        for rid in iteration.rids:
            passes[rid].append(i)
    return results_of(engine, asks), passes, scenarios.counts(engine) - before


# --- Scenarios ----------------------------------------------------------------------------


def mixed_asks() -> tuple[list[Ask], list[int]]:
    """Requests of all kinds and both classes, more plain offline ones, and their arrivals.

    The n-th request of each kind has the same prompt. Online requests come in bursts,
    with time between for offline requests to run.
    """
    rng = random.Random(3)
    asks: list[Ask] = []
    for i, length in enumerate((40, 250)):
        prompt = scenarios.prompt(i, length)
        for kind in KINDS:
            asks.append(Ask(f"{kind} on{i}", kind, prompt, rng.randrange(5, 25), False))
            asks.append(Ask(f"{kind} off{i}", kind, prompt, rng.randrange(20, 40), True))
    asks += [
        Ask(f"more{i}", "plain", scenarios.prompt(50 + i, 30 + 60 * i), 60, True) for i in range(8)
    ]
    num_online, arrivals = 0, []
    for ask in asks:
        arrivals.append(0 if ask.offline else 20 + 30 * (num_online // 4))
        num_online += not ask.offline
    return asks, arrivals


def run_suspended(
    engine: ScriptedEngine, asks: Sequence[Ask], arrivals: Sequence[int], drops: float
) -> tuple[dict[str, Any], dict[str, int]]:
    """Run them while steps of the offline lane are suspended, and this part of them dropped."""
    stops = suspensions_of(engine)
    with stops.stopping(seed=4, probability=0.5, drops=drops):
        results, _, counts = run_script(engine, asks, arrivals)
    counts["resumed steps"] = engine.scheduler.parts.lane.safepoints.stats.resumed
    return results, counts


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
@pytest.mark.parametrize(
    ("drops", "counted"),
    [
        pytest.param(None, ("paused", "resumed", "parked", "retracted"), id="paused"),
        pytest.param(0.0, ("resumed steps",), id="suspended"),
        pytest.param(0.2, ("resumed steps", "dropped"), id="dropped"),
    ],
)
def test_everything_comes_out_as_from_stock_beside_requests_that_give_way(
    start: Start, from_stock: Any, overlap: bool, drops: float | None, counted: Sequence[str]
) -> None:
    asks, arrivals = mixed_asks()
    expected = from_stock(asks)
    for kind in KINDS:
        assert kind == "plain" or expected[f"{kind} off1"] != expected["plain off1"]
    if drops is None:
        results, _, counts = start_tight(start, overlap=overlap).call(run_script, asks, arrivals)
    else:
        suspending = start_tight(start, overlap=overlap, safepoint_interval=1)
        results, counts = suspending.call(run_suspended, asks, arrivals, drops)
    if overlap:
        # How late SGLang counts a token for penalties then depends on the passes between.
        for rid in [rid for rid in results if rid.startswith("penalties")]:
            del results[rid], expected[rid]
    assert_same(results, expected)
    assert min(counts[name] for name in counted) > (0 if drops is None else 10), counts


def run_and_retract_once(engine: ScriptedEngine, asks: Sequence[Ask]) -> dict[str, Any]:
    """Retract every request when it has ten tokens."""
    scheduler = engine.scheduler

    def script(iteration: int) -> list[Any]:
        if iteration == 0:
            return [ask.message(engine) for ask in asks]
        if iteration > 200:
            raise StopIteration
        scheduler.running_batch.filter_batch()
        requests = scheduler.running_batch.reqs
        due = {
            req.rid for req in requests if len(req.output_ids) >= 10 and not req.retraction_count
        }
        scheduler.parts.retraction.retract(due, scheduler.running_batch)
        return []

    engine.run(script)
    engine.assert_nothing_leaked()
    assert {engine.reqs[ask.rid].retraction_count for ask in asks} == {1}
    return results_of(engine, asks)


def test_a_retracted_request_goes_on_as_if_it_had_not_been(start: Start, from_stock: Any) -> None:
    asks = [Ask(f"{kind} once", kind, scenarios.prompt(1, 30), 40, True) for kind in KINDS]
    results = start_tight(start, overlap=False).call(run_and_retract_once, asks)
    assert_same(results, from_stock(asks))


def test_decodes_and_prefills_take_turns_where_sglang_cannot_mix_them(start: Start) -> None:
    """An online request with log-probabilities keeps decoding among offline prefills."""
    backlog = [Ask(f"off{i}", "plain", scenarios.prompt(i, 300), 20, True) for i in range(40)]
    online = Ask("on", "logprobs", scenarios.prompt(99, 30), 40, False)
    engine = start(max_total_tokens=8192, coserve=LOOSE)
    _, passes, _ = engine.call(run_script, [*backlog, online], [0] * 40 + [3])
    assert max(after - before for before, after in pairwise(passes["on"])) <= 2


def test_an_online_request_does_not_wait_for_the_adapters_of_offline_requests(
    start: Start, from_stock: Any
) -> None:
    kinds = ("plain", "poet", "clerk")
    asks = [Ask(kind, kind, scenarios.prompt(i, 30), 150, True) for i, kind in enumerate(kinds)]
    asks.append(Ask("on", "pilot", scenarios.prompt(9, 30), 20, False))
    engine = start(max_total_tokens=8192, coserve=LOOSE)
    results, passes, counts = engine.call(run_script, asks, [0, 0, 0, 10])
    assert_same(results, from_stock(asks))
    assert passes["on"][0] <= 11
    # As many of the others as there are places for stay.
    assert counts["retracted"] == 1


def test_a_prefill_leaves_its_adapters_place_to_online_requests_and_goes_on_later(
    start: Start, from_stock: Any
) -> None:
    asks = [Ask("off", "pilot", scenarios.prompt(1, 900), 60, True)]
    for i, kind in enumerate(("plain", "poet", "clerk")):
        asks.append(Ask(f"on {kind}", kind, scenarios.prompt(2 + i, 30), 40, False))
    engine = start(max_total_tokens=8192, coserve=LOOSE)
    results, passes, counts = engine.call(run_script, asks, [0, 2, 2, 2])
    assert_same(results, from_stock(asks))
    assert counts["retracted"] == 1
    assert max(passes["off"]) > max(passes["on clerk"])
