"""What it costs to suspend a step and go on with it, and whether anything comes out differently.

    python benchmark/bench_suspension.py --out benchmark/results/suspension_cpu.json

A real scheduler and a model of 24 layers in one thread, on a clock of CPU time, run the same
offline prompts again and again: without a suspension, and with every pass of the lane stopped
before a random layer. What one costs is the time from the end of the last layer before the stop to
the beginning of the next one: the stop, the scheduling pass behind it, and preparing the step once
more.

KV slots are counted, and outputs (greedy, fp32) compared token by token. What rounds differently
in batches of other sizes may decide between two tokens that are equally likely: where outputs
differ, the model is asked once more by ``transformers``, and only a difference between tokens
whose logits are more than 1e-4 apart counts.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from common.own_process import OwnProcess
from common.results import write_results
from sglang_coserve.interrupts import terminate_as_interrupt
from sglang_coserve.progress_bar import progress_bar
from sglang_coserve.small_model import SmallModelSpec, make_small_model
from suspend_bench.engine import SuspendedEngine, SuspensionRun

_TIE: Final = 1e-4


def main() -> None:
    """Run the benchmark; print the figures, write them."""
    options = parse_options()
    rng = random.Random(0)
    lengths = [rng.randint(16, options.longest) for _ in range(options.prompts)]
    repeats: list[dict[str, Any]] = []
    spec = SmallModelSpec(layers=options.layers, hidden=options.hidden)
    with tempfile.TemporaryDirectory() as directory, terminate_as_interrupt():
        model = make_small_model(Path(directory) / "model", spec)
        with OwnProcess(SuspendedEngine, model, options.core) as engine, progress_bar() as bar:
            steps = bar.add_task("suspending", total=2 * options.repeats)

            def run(probability: float) -> SuspensionRun:
                result: SuspensionRun = engine.call(
                    "run", lengths, options.output_tokens, probability
                )
                bar.advance(steps)
                return result

            repeats += [compared(run(0.0), run(1.0)) for _ in range(options.repeats)]
        for repeat in repeats:
            margins = [margin(model, *each) for each in repeat.pop("differences")]
            repeat["near_ties"] = sum(each <= _TIE for each in margins)
            repeat["different"] = len(margins) - repeat["near_ties"]
    costs_ms = [cost for repeat in repeats for cost in repeat["costs_ms"]]
    low, middle, high = np.percentile(costs_ms, [5, 50, 99])
    total = {key: sum(r[key] for r in repeats) for key in ("different", "near_ties", "leaked")}
    print(f"one suspension: {middle:.2f} ms of CPU time (P5 {low:.2f}, P99 {high:.2f})")
    print(
        f"{len(costs_ms):,} suspensions: {total['different']} outputs different "
        f"(and {total['near_ties']} at a near-tie), {total['leaked']} KV slots leaked"
    )
    write_results(options.out, options, repeats=repeats)


def compared(whole: SuspensionRun, suspended: SuspensionRun) -> dict[str, Any]:
    """Return what the suspensions of one run cost, and where its outputs differ."""
    return {
        "costs_ms": [1e3 * cost_s for cost_s in suspended.costs_s],
        "differences": [
            (suspended.prompts[rid], output, suspended.outputs[rid])
            for rid, output in whole.outputs.items()
            if suspended.outputs[rid] != output
        ],
        "leaked": suspended.leaked_tokens,
    }


def margin(model: Path, prompt: list[int], one: list[int], other: list[int]) -> float:
    """Return how far apart the logits of the first two tokens are that differ."""
    import torch
    from transformers import AutoModelForCausalLM

    shared = next(
        place for place, pair in enumerate(zip(one, other, strict=True)) if len(set(pair)) > 1
    )
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        logits = loaded(torch.tensor([[*prompt, *one[:shared]]])).logits[0, -1]
    return float(abs(logits[one[shared]] - logits[other[shared]]))


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--longest", type=int, default=800, help="prompt, in tokens")
    parser.add_argument("--output-tokens", type=int, default=24)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
