"""SGLang's rules about chunks, on its own scheduler: whole prompts, alignment, tokens of a step."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from sglang_coserve.core.snapshot import ChunkRules
from sglang_coserve.srt.steps.engine_queues import EngineQueues
from srt.conftest import Reference
from srt.scripted_engine import EngineProcess, ScriptedEngine, Spec

PLANNED = {"offline_policy": "coserve", "startup_profile_seconds": 0.0}
TARGETS = {**PLANNED, "slo_ttft_ms": 300.0, "slo_tpot_ms": 20.0}
MEMORY = 4096


def prompt(seed: int, tokens: int) -> list[int]:
    return [random.Random(seed).randrange(3, 900) for _ in range(tokens)]


DECODE: Spec = ("decode", prompt(1, 20), 120, False)
RUNS: Spec = ("runs", prompt(2, 30), 100, True)
LONG: Spec = ("long", prompt(3, 800), 4, True)
ARRIVES: Spec = ("arrives", prompt(4, 700), 4, False)
WORK = [DECODE, RUNS, LONG, ARRIVES]


def run_work(engine: ScriptedEngine) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Return the outputs, and the lengths of the pieces of each prompt."""
    begin = [engine.request(*spec) for spec in WORK[:-1]]
    passes = engine.run({0: begin, 20: [engine.request(*ARRIVES)]})
    pieces: dict[str, list[int]] = {spec[0]: [] for spec in WORK}
    for one in passes:
        # The decodes of a mixed batch come last, and have one token each.
        for rid, tokens in zip(one.rids, one.extend_lens, strict=False):
            if tokens > 1:
                pieces[rid].append(tokens)
    engine.assert_nothing_leaked()
    return engine.outputs(WORK), pieces


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
def test_prompts_stay_whole_where_sglang_cuts_none(
    start_engine: Any, reference_outputs: Reference, overlap: bool
) -> None:
    engine: EngineProcess = start_engine(
        overlap=overlap, chunked_prefill_size=-1, max_total_tokens=MEMORY, coserve=TARGETS
    )
    outputs, pieces = engine.call(run_work)
    assert outputs == reference_outputs(WORK)
    assert pieces == {rid: [len(tokens)] for rid, tokens, _, _ in WORK}
    engine.close()


def run_an_aborted_batch(engine: ScriptedEngine) -> list[int]:
    """The only offline request leaves while an online prompt is read: the next pass has no plan."""
    begin = [engine.request(*DECODE)]
    arrive = [engine.request(*ARRIVES), engine.request(*LONG)]

    def script(iteration: int) -> Iterable[Any]:
        if iteration == 0:
            return begin
        if iteration == 6:
            return arrive
        if iteration == 7:
            return [engine.abort("long")]
        if iteration > 7:
            raise StopIteration
        return []

    engine.run(script)
    engine.assert_nothing_leaked()
    return engine.output("arrives")


def test_a_pass_without_a_plan_follows_plans_where_sglang_cuts_none(
    start_engine: Any, reference_outputs: Reference
) -> None:
    engine: EngineProcess = start_engine(
        chunked_prefill_size=-1, max_total_tokens=MEMORY, coserve=TARGETS
    )
    assert engine.call(run_an_aborted_batch) == reference_outputs([ARRIVES])["arrives"]
    engine.close()


def run_aligned(engine: ScriptedEngine, *, told: bool) -> dict[str, list[int]]:
    engine.scheduler.truncation_align_size = 64
    try:
        with pytest.MonkeyPatch.context() as patch:
            if not told:
                patch.setattr(EngineQueues, "chunk_rules", ChunkRules())
            return run_work(engine)[1]
    finally:
        engine.scheduler.truncation_align_size = None


def run_told(engine: ScriptedEngine) -> dict[str, list[int]]:
    return run_aligned(engine, told=True)


def run_not_told(engine: ScriptedEngine) -> tuple[list[int], int]:
    """Plans make pieces that SGLang leaves out. Return those of the arrival, and its first pass."""
    first = len(engine.iterations)
    pieces = run_aligned(engine, told=False)
    passes = engine.iterations[first:]
    return pieces["arrives"], next(i for i, one in enumerate(passes) if "arrives" in one.rids)


def test_pieces_are_multiples_of_sglangs_alignment(start_engine: Any) -> None:
    engine: EngineProcess = start_engine(max_total_tokens=MEMORY, coserve=TARGETS)
    pieces = engine.call(run_told)
    assert all(tokens % 64 == 0 for each in pieces.values() for tokens in each[:-1])
    assert {rid: sum(each) for rid, each in pieces.items()} == {s[0]: len(s[1]) for s in WORK}


def test_a_rule_that_plans_do_not_know_keeps_no_online_prompt_waiting(start_engine: Any) -> None:
    engine: EngineProcess = start_engine(max_total_tokens=MEMORY, coserve=TARGETS)
    pieces, begins = engine.call(run_not_told)
    assert sum(pieces) == len(ARRIVES[1])
    assert begins < 40  # It comes before pass 20; the decode ends about pass 120.


def run_many_decodes(engine: ScriptedEngine) -> int:
    """Return the most tokens of a batch with prompts."""
    begin = [engine.request(f"d{n}", prompt(n, 6), 60) for n in range(12)]
    begin.append(engine.request("off", prompt(30, 90), 40, True))
    passes = engine.run(
        {
            0: begin,
            30: [
                engine.request("long", prompt(40, 200), 4),
                engine.request("more", prompt(41, 200), 4, True),
            ],
        }
    )
    engine.assert_nothing_leaked()
    return max(sum(one.extend_lens) for one in passes if one.is_extend)


@pytest.mark.parametrize("chunk_tokens", [32, 8])
def test_no_batch_with_prompts_exceeds_sglangs_chunk_size(
    start_engine: Any, chunk_tokens: int
) -> None:
    engine: EngineProcess = start_engine(
        chunked_prefill_size=chunk_tokens, max_total_tokens=MEMORY, coserve=TARGETS
    )
    assert engine.call(run_many_decodes) <= chunk_tokens
    engine.close()
