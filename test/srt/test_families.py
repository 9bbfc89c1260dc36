"""Families of models, one small engine each: with suspended and dropped steps, paused and retracted
requests they generate what stock SGLang does, which is what transformers does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from srt import test_scheduler as scenarios
from srt.families import make_family_model
from srt.scripted_engine import EngineProcess, EngineSpec, ScriptedEngine, Spec, run_at_once
from srt.test_planned_scheduler import LOOSE

PLANNED = {
    **LOOSE,
    "startup_profile_seconds": 1.0,
    "slo_ttft_ms": 10_000.0,  # Offline requests run together, however slow the machine is.
    "safepoint_interval": 1,
}

SMALL = {
    "max_total_tokens": 1024,
    # Less KV in the window's pool than the longest prompts have tokens.
    "swa_full_tokens_ratio": 0.3,
    "chunked_prefill_size": 128,
    "schedule_conservativeness": 0.1,
}

ROOMY = {"max_total_tokens": 65536, "chunked_prefill_size": 8192}

SPECS = scenarios.mixed_specs(seed=1, num_online=6, num_offline=10)

CROWD: list[Spec] = [
    *((f"crowd{i}", scenarios.prompt(20 + i, 12), 120, True) for i in range(6)),
    ("large", scenarios.prompt(3, 860), 12, False),
]
"""The large prompt leaves room for some of the others, and its own target leaves them no time.

Theirs are so short, and their outputs so long, that they run together even where a step takes a
single token of a prompt, as it does where the startup profile found no fixed cost.
"""


@dataclass(frozen=True)
class Case:
    """A family, and how its engine runs."""

    family: str
    overlap: bool = False
    page_size: int = 1
    radix: bool = True

    def __str__(self) -> str:
        loop = "overlap" if self.overlap else "normal"
        return f"{self.family}-{loop}-page{self.page_size}-{'radix' if self.radix else 'chunk'}"


CASES = [
    Case("gpt_oss"),
    Case("gemma2"),
    Case("qwen3_moe"),
    Case("deepseek_v3"),
    Case("qwen3_next"),
    *(
        pytest.param(case, marks=pytest.mark.heavy)
        for case in (
            Case("gpt_oss", overlap=True, page_size=16),
            Case("gemma3_text", page_size=16),
            Case("mixtral", overlap=True),
            Case("deepseek_v3", overlap=True, page_size=16),
            Case("qwen3_next", radix=False),
            Case("lfm2"),
        )
    ),
]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts engines of a family's model; ends them with the test."""
    running: list[EngineProcess] = []

    def start(family: str, settings: dict[str, Any], **spec: Any) -> EngineProcess:
        if not (tmp_path / "config.json").exists():
            make_family_model(tmp_path, family)
        server_args = tuple(sorted(settings.items()))
        running.append(EngineProcess(EngineSpec(tmp_path, server_args=server_args, **spec)))
        return running[-1]

    yield start
    for process in running:
        process.close()


def generated_by_transformers(directory: Path, prompt: list[int], max_new_tokens: int) -> list[int]:
    import torch
    from transformers import AutoModelForCausalLM

    # Its quicker attention leaves out the caps of Gemma 2.
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    length = {"max_new_tokens": max_new_tokens, "min_new_tokens": max_new_tokens}
    with torch.no_grad():
        tokens = model.generate(torch.tensor([prompt]), do_sample=False, **length)
    return tokens[0, len(prompt) :].tolist()


def run_mixed(
    engine: ScriptedEngine, specs: Sequence[Spec]
) -> tuple[dict[str, list[int]], set[str], dict[str, int]]:
    """Serve with little KV, steps stopped before random layers and now and then dropped."""
    from srt.safepoint.random_suspensions import suspensions_of

    stops = suspensions_of(engine)
    with stops.stopping(3, probability=0.5, drops=0.03):
        outputs, aborted, counts = scenarios.run_mixed(engine, specs, 3)
    state = engine.scheduler.parts.lane.safepoints.state()["safepoints"]
    counts["suspended"] = sum(state["suspended"].values())
    counts["resumed_steps"] = state["resumed"]
    assert not len(engine.scheduler.parts.requests)
    return outputs, aborted, counts


def run_crowd(engine: ScriptedEngine) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Let an online request displace some offline requests, and the others wait for its tokens."""
    from sglang_coserve.srt.safepoint.safepoints import Safepoints

    parts, before = engine.scheduler.parts, scenarios.counts(engine)

    def script(iteration: int) -> Iterator[Any]:
        if iteration == 0:
            return iter([engine.request(*spec[:3], offline=True) for spec in CROWD[:-1]])
        if CROWD[-1][0] in engine.reqs:
            raise StopIteration
        lengths = [(len(engine.output(rid)), len(text)) for rid, text, *_ in CROWD[:-1]]
        if sum(output + text for output, text in lengths if output) < 200:
            return iter(())  # How many steps that takes depends on how fast the machine is.
        request = engine.request(*CROWD[-1][:3])
        request.sampling_params.custom_params = {"coserve_slo_tpot_ms": 0.01}
        return iter([request])

    # With a lane of their own they would not have to.
    safepoints, parts.lane.safepoints = parts.lane.safepoints, Safepoints.none()
    try:
        engine.run(script)
    finally:
        parts.lane.safepoints = safepoints
    engine.assert_nothing_leaked()
    after = scenarios.counts(engine)
    counts = {name: after[name] - before.get(name, 0) for name in ("retracted", "paused")}
    return {spec[0]: engine.output(spec[0]) for spec in CROWD}, counts


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_loaded_engine_of_every_family_generates_what_stock_does(
    start: Any, tmp_path: Path, case: Case
) -> None:
    stock = start(case.family, ROOMY, stock=True)
    expected = stock.call(run_at_once, [*SPECS, *CROWD])
    stock.close()
    longest = max((spec for spec in SPECS if spec[2] > 6), key=lambda spec: len(spec[1]))
    assert expected[longest[0]][:6] == generated_by_transformers(tmp_path, longest[1], 6)

    settings = {**SMALL, "page_size": case.page_size, "disable_radix_cache": not case.radix}
    coserve = tuple(PLANNED.items())
    ours = start(case.family, settings, overlap=case.overlap, coserve=coserve)
    outputs, aborted, counts = ours.call(run_mixed, SPECS)
    scenarios.assert_outputs(SPECS, outputs, aborted, expected)
    assert min(counts[name] for name in ("dropped", "suspended", "resumed_steps")) > 0, counts

    outputs, counts = ours.call(run_crowd)
    assert outputs == {spec[0]: expected[spec[0]] for spec in CROWD}
    assert counts["retracted"] > 0
    assert counts["paused"] > 0


CHECKPOINTS = "--kv-checkpoint eager"


@pytest.mark.parametrize(
    ("family", "flags", "told"),
    [
        ("gpt_oss", CHECKPOINTS, f"{CHECKPOINTS} needs a model .*sliding window"),
        ("qwen3_next", CHECKPOINTS, f"{CHECKPOINTS} needs a model .*a state instead"),
        ("deepseek_v3", CHECKPOINTS, f"{CHECKPOINTS} needs a model .*on a GPU only"),
        (
            "gpt_oss",
            "--disable-radix-cache",
            "co-serving needs the radix cache",
        ),
    ],
)
def test_what_a_family_cannot_have_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, flags: str, told: str
) -> None:
    from sglang_coserve.srt import launch

    make_family_model(tmp_path, family)
    assert launch.main(["--model-path", str(tmp_path), *flags.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert re.match(f"error: {told}", line)
