"""One request does not end or stall the others in the scheduler.

Whatever spoils its logits ends that request only, in both classes and both event loops.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import pytest

from srt import test_scheduler as scenarios
from srt.scripted_engine import EngineProcess, ScriptedEngine
from srt.test_planned_scheduler import TIGHT

NUM_GOOD_TOKENS = 5
"""After which the processor of a bad request spoils its logits."""

HARMS = ("nan", "infinite", "nothing", "error", "shape")


def harm() -> str:
    """A logit processor as a client sends it; ``custom_params`` say how it spoils its logits."""
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    class Harm(CustomLogitProcessor):
        def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
            for row, params in enumerate(custom_param_list):
                if len(params["__req__"].output_ids) < 5:
                    continue
                if params["harm"] == "nan":
                    logits[row, 7] = float("nan")
                elif params["harm"] == "infinite":
                    logits[row, 7] = float("inf")
                elif params["harm"] == "nothing":
                    logits[row] = float("-inf")
                elif params["harm"] == "shape":
                    return logits[:, :3]
                else:
                    raise KeyError("harm")
            return logits

    return str(Harm.to_str())


def bad_request(engine: ScriptedEngine, how: str, offline: bool, sampled: bool) -> Any:
    rid = f"bad-{how}-{'off' if offline else 'on'}-{'sampled' if sampled else 'greedy'}"
    params = {"harm": how, **({"coserve_class": "offline"} if offline else {})}
    request = engine.request(rid, scenarios.prompt(len(rid), 40), 60)
    request.sampling_params.custom_params = params
    if sampled:
        request.sampling_params.top_k = 1 << 30
        request.return_logprob = True
        request.top_logprobs_num = 2
    request.custom_logit_processor = harm()
    return request


def run_beside_others(engine: ScriptedEngine, *, with_bad: bool) -> dict[str, Any]:
    """Good requests of both classes, joined one after the other by bad ones.

    Returns the tokens of the good ones, and how the bad ones ended.
    """
    # Their sum is more than the memory: offline requests are paused, parked and retracted.
    specs = scenarios.mixed_specs(seed=5, num_online=12, num_offline=12)
    good = [engine.request(*spec[:3], offline=spec[3]) for spec in specs]
    bad = [
        bad_request(engine, how, offline, sampled)
        for how in HARMS
        for offline in (False, True)
        for sampled in (False, True)
    ]

    def script(iteration: int) -> list[Any]:
        if not good and not (with_bad and bad):
            raise StopIteration
        arrived = [good.pop()] if good and iteration % 3 == 0 else []
        if with_bad and bad and iteration % 2 == 0:
            arrived.append(bad.pop())
        return arrived

    engine.run(script)
    ends = {
        rid: (req.finished_reason.to_json(), len(req.output_ids))
        for rid, req in engine.reqs.items()
        if rid.startswith("bad-")
    }
    outputs = {spec[0]: engine.output(spec[0]) for spec in specs}
    engine.assert_nothing_leaked()
    engine.reqs.clear()
    return {"outputs": outputs, "ends": ends}


def run_both_ways(engine: ScriptedEngine) -> dict[str, Any]:
    alone = run_beside_others(engine, with_bad=False)["outputs"]
    return {"alone": alone, **run_beside_others(engine, with_bad=True)}


@pytest.fixture(params=[False, True], ids=["normal", "overlap"])
def guarded(request: pytest.FixtureRequest, start_engine: Any) -> EngineProcess:
    return start_engine(
        overlap=request.param,
        page_size=16 if request.param else 1,
        coserve=TIGHT,
        enable_custom_logit_processor=True,
    )


def test_only_the_request_with_unusable_logits_ends(guarded: EngineProcess) -> None:
    found = guarded.call(run_both_ways)
    assert found["outputs"] == found["alone"]
    assert len(found["ends"]) == len(HARMS) * 4
    for rid, (end, num_tokens) in found["ends"].items():
        assert end["type"] == "abort", rid
        assert end["status_code"] == 400, rid
        assert "could not choose a token" in end["message"]
        # The processor of an overlapping step is asked one token early, or sees one too few.
        assert NUM_GOOD_TOKENS <= num_tokens <= NUM_GOOD_TOKENS + 2, rid


def run_scores_after_a_bad_request(engine: ScriptedEngine) -> list[str]:
    """Two requests that want scores of their prompts and no token; SGLang looks at no logits."""
    engine.run([bad_request(engine, "nan", offline=False, sampled=False)])
    scored = [engine.request(f"scored-{i}", scenarios.prompt(i, 20), 0) for i in range(2)]
    for request in scored:
        request.return_logprob = True
    engine.run(scored)
    engine.assert_nothing_leaked()
    ends = [engine.reqs[request.rid].finished_reason.to_json()["type"] for request in scored]
    engine.reqs.clear()
    return ends


def test_scores_are_not_refused_for_the_logits_of_an_earlier_request(
    guarded: EngineProcess,
) -> None:
    assert guarded.call(run_scores_after_a_bad_request) == ["length", "length"]


@contextmanager
def refusals(engine: ScriptedEngine) -> Generator[dict[str, Any]]:
    """Within it, the reasons why requests are refused, by rid."""
    refused: dict[str, Any] = {}
    sender = engine.scheduler.ipc_channels.send_to_tokenizer
    send_output = sender.send_output

    def noted(output: Any, *args: Any) -> Any:
        if getattr(output, "finished_reason", None) is not None:
            assert output.rid not in refused, "it was answered already"
            refused[output.rid] = output.finished_reason
        return send_output(output, *args)

    sender.send_output = noted
    try:
        yield refused
    finally:
        sender.send_output = send_output


def run_bad_processors(engine: ScriptedEngine) -> dict[str, Any]:
    requests = []
    for rid, text in {
        "no-json": "x",
        "no-code": '{"callable": "00"}',
        "no-hex": '{"callable": "x"}',
    }.items():
        requests.append(engine.request(rid, [5, 6, 7], 4))
        requests[-1].custom_logit_processor = text
    requests.append(engine.request("good", [5, 6, 7], 4))
    with refusals(engine) as refused:
        engine.run(requests)
    assert engine.output("good")
    engine.assert_nothing_leaked()
    engine.reqs.clear()
    return refused


def test_a_processor_that_cannot_be_made_is_refused_alone(guarded: EngineProcess) -> None:
    refused = guarded.call(run_bad_processors)
    assert len(refused) == 3
    for reason in refused.values():
        assert (reason["type"], reason["status_code"]) == ("abort", HTTPStatus.BAD_REQUEST)
        assert "custom_logit_processor" in reason["message"]


def run_refusal_within_a_step(engine: ScriptedEngine) -> dict[str, Any]:
    """SGLang queues a request whose grammar is ready, or that was retracted, in the midst of a
    step. The queue fails then."""
    scheduler = engine.scheduler
    enqueue = scheduler.parts.admission.enqueue
    ready = engine.request("bad", [5, 6, 7], 4, offline=True)
    retracted = [engine.request("again", [5, 6, 9], 40, offline=True)]
    has_retracted: list[int] = []

    def failing(req: Any) -> None:
        if req.rid == "bad" or req.retraction_count:
            raise KeyError("no place in the queue")
        enqueue(req)

    class Grammars:
        """Has one request whose grammar is ready in the first step that asks."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner
            self._ready = [ready]

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def has_waiting_grammars(self) -> bool:
            return bool(self._ready)

        def get_ready_grammar_requests(self) -> list[Any]:
            made: list[Any] = []
            message = self._ready.pop()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(scheduler, "_add_request_to_queue", made.append)
                scheduler.handle_generate_request(message)
            return made

    def script(iteration: int) -> list[Any]:
        running = {
            req.rid for req in scheduler.parts.queues.requests_with_kv(scheduler.running_batch)
        }
        if "again" in running and not has_retracted:
            scheduler.running_batch.filter_batch()
            scheduler.parts.retraction.retract({"again"}, scheduler.running_batch)
            has_retracted.append(iteration)
        # When it runs depends on how fast the machine is.
        assert iteration < 500, "the request that is to be retracted never ran"
        if has_retracted and iteration > has_retracted[0] + 2:
            raise StopIteration
        online = [engine.request("good", [5, 6, 7], 20)]
        return [*online, *retracted] if iteration == 0 else []

    with pytest.MonkeyPatch.context() as patch, refusals(engine) as refused:
        patch.setattr(scheduler.parts.admission, "enqueue", failing)
        patch.setattr(scheduler, "grammar_manager", Grammars(scheduler.grammar_manager))
        engine.run(script)
    engine.assert_nothing_leaked()
    known, tokens = len(scheduler.parts.requests), len(engine.output("good"))
    engine.reqs.clear()
    return {"refused": set(refused), "known": known, "tokens": tokens}


def test_what_cannot_be_queued_within_a_step_ends_only_itself(guarded: EngineProcess) -> None:
    found = guarded.call(run_refusal_within_a_step)
    assert found == {"refused": {"bad", "again"}, "known": 0, "tokens": 20}


def run_first_penalties(engine: ScriptedEngine) -> int:
    """Return how many functions torch compiled for the first requests with penalties."""
    import torch

    torch._dynamo.utils.counters.clear()
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.1}
    engine.run([engine.request(f"p{i}", [5, 6, i], 6, **penalties) for i in range(3)])
    engine.assert_nothing_leaked()
    engine.reqs.clear()
    return sum(torch._dynamo.utils.counters["frames"].values())


def test_nothing_is_compiled_while_requests_wait(guarded: EngineProcess) -> None:
    """The first repetition penalty stalled the scheduler for 23 s."""
    assert guarded.call(run_first_penalties) == 0


def run_stop_tokens_outside(engine: ScriptedEngine) -> str:
    """A stop token outside of the vocabulary, beside a request with a least length."""
    requests = [engine.request(rid, [5, 6, 7], 12) for rid in ("stops", "lasts")]
    requests[0].sampling_params.stop_token_ids = {10**6}
    requests[1].sampling_params.min_new_tokens = 4
    from sglang_coserve.guard.engine_limits import ModelLimits, check_values

    config = engine.scheduler.model_config
    model = ModelLimits(config.vocab_size, config.hidden_size, config.context_len)
    for request in requests:
        check_values(request, model, None)
    engine.run(requests)
    engine.assert_nothing_leaked()
    ends = {engine.reqs[request.rid].finished_reason.to_json()["type"] for request in requests}
    engine.reqs.clear()
    return str(ends)


def test_a_stop_token_outside_of_the_vocabulary_harms_no_other(guarded: EngineProcess) -> None:
    assert guarded.call(run_stop_tokens_outside) == "{'length'}"
