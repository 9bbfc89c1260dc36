"""Grammars are tried apart from the server: what they do is told, and ends nothing else."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_coserve.guard import grammar_process
from sglang_coserve.guard.grammar_process import GrammarSettings
from srt.own_process import printed_by

TIMEOUT_S = 100

Fault = Callable[..., str | None]


@pytest.fixture(scope="module")
def settings(small_model: Path) -> GrammarSettings:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(small_model)
    return GrammarSettings(tokenizer, len(tokenizer), None, any_whitespace=True)


@pytest.fixture(scope="module")
def fault(settings: GrammarSettings) -> Iterator[Fault]:
    """Has grammars tried at once; returns what is wrong with the last of them."""
    from sglang_coserve.guard.grammars import GrammarTrials

    trials = GrammarTrials(settings)
    loop = asyncio.new_event_loop()

    async def check(grammars: list[dict[str, str]]) -> list[Any]:
        kinds = dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"))
        all_params = [SimpleNamespace(**{**kinds, **grammar}) for grammar in grammars]
        checks = asyncio.gather(*map(trials.check, all_params), return_exceptions=True)
        return await asyncio.wait_for(checks, TIMEOUT_S)

    def run(*grammars: dict[str, str]) -> str | None:
        last = loop.run_until_complete(check(list(grammars)))[-1]
        assert last is None or isinstance(last, ValueError)
        return last and str(last)

    yield run
    trials.close()
    loop.close()


@pytest.mark.parametrize(
    "grammar",
    [
        {},
        {"regex": "[a-z]{1,9}"},
        {"ebnf": 'root ::= "a" root | "b"'},
        {"json_schema": "$$ANY$$"},
        {"json_schema": json.dumps({"type": "array", "items": {"$ref": "#"}})},
        {
            "structural_tag": json.dumps(
                {
                    "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
                    "triggers": ["<f"],
                }
            )
        },
    ],
    ids=str,
)
def test_what_can_be_used_is_not_complained_of(fault: Fault, grammar: dict[str, str]) -> None:
    assert fault(grammar) is None


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        ({"json_schema": '{"$ref": "#"}'}, "json_schema cannot be used: it allows no token"),
        ({"ebnf": "root ::= root"}, "it allows no token"),
        ({"json_schema": '{"type": "nothing"}'}, "Unsupported type"),
        ({"json_schema": "{"}, "json_schema cannot be used"),
        ({"regex": "(("}, "not closed"),
        ({"regex": "x" * (2 << 20)}, "use at most"),
        ({"structural_tag": "3"}, "malformed"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_used_is_told(fault: Fault, grammar: dict[str, str], told: str) -> None:
    for _ in range(2):  # The second time from memory.
        assert told in str(fault(grammar))


def test_many_grammars_at_once_each_get_their_own_answer(fault: Fault) -> None:
    good = [{"regex": f"a{{{n}}}"} for n in range(1, 40)]
    assert fault(*good, {"regex": "(("}) is not None
    assert fault({"regex": "(("}, *good) is None


COMPILER = """
import os, time
from multiprocessing import Pipe
from sglang_coserve.guard import grammar_process as process

class Compiler:
    def fault(self, kind, text):
        if text == "crash":
            os.abort()
        if text == "recurse":
            return self.fault(kind, text) or None
        if text == "loop":
            while True:
                pass
        if text == "sleep":
            time.sleep(1000)
        if text == "memory":
            return str(len(bytearray(8 << 30)))
        return "bad" if text == "bad" else None

process.MOST_CPU_S, process.MOST_S = 1, 3.0
theirs, ours = Pipe()
if os.fork() == 0:
    ours.close()
    try:
        process.serve_trials(theirs, Compiler())
    finally:
        os._exit(0)
theirs.close()
texts = ["good", "crash", "recurse", "loop", "sleep", "memory", "bad", "good"]
for text in texts:
    ours.send(("regex", text))
    print(text, "|", ours.recv())
ours.close()
os.wait()
print("ended")
"""


def test_whatever_a_compiler_does_ends_only_the_trial() -> None:
    """A compiler that crashes and hangs stands in for what is not known of the real one."""
    lines = printed_by(COMPILER)
    told = dict(line.split(" | ") for line in lines[:-1])
    assert told["good"] == "None"
    assert told["bad"] == "bad"
    assert "takes longer than" in told["loop"]
    assert "takes longer than" in told["sleep"]
    for text in ("crash", "recurse", "memory"):
        assert "more stack or memory" in told[text], text
    assert lines[-1] == "ended"


def test_a_busy_machine_does_not_make_a_grammar_slow(settings: GrammarSettings) -> None:
    """Others may have the processor for longer than a token may take."""
    compiler = grammar_process.TrialCompiler(settings)
    grammar = compiler._compiled("regex", "[a-z]*")
    pauses = 0

    def pause(*_: object) -> None:
        nonlocal pauses
        pauses += 1
        time.sleep(2 * grammar_process._MOST_STEP_S)

    former = signal.signal(signal.SIGVTALRM, pause)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.01, 0.01)
    try:
        while pauses < 3:
            assert compiler._walk(grammar) is None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, former)


def test_the_cache_keeps_what_was_used_last_within_its_bounds() -> None:
    from sglang_coserve.guard.grammars import grammar_cache

    def grammar(num_bytes: int) -> Any:
        compiled = SimpleNamespace(memory_size_bytes=num_bytes)
        return SimpleNamespace(grammar=SimpleNamespace(ctx=compiled))

    cache = grammar_cache()
    for number in range(2000):
        cache["regex", str(number)] = object() if number % 2 else grammar(0)
        cache.get(("regex", "0"))
    assert len(cache) == 1024
    assert ("regex", "0") in cache
    for number in range(3):
        cache["json", str(number)] = grammar(100 << 20)
    assert ("json", "0") not in cache
    assert len(cache) < 512
    cache["json", "huge"] = grammar(1 << 40)
    assert list(cache) == [("json", "huge")]
