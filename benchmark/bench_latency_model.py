"""How fast the latency models are, and how well each fits one modelled machine.

Usage: python benchmark/bench_latency_model.py [--samples 80000]

The samples are times of a roofline of Llama-3.1-8B on an H100 with 3% noise:
modelled, not measured. They compare the models with each other and say nothing
of their error on a real machine.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from sglang_coserve.core.latency_model import (
    BROS,
    CONSERVE,
    HYGEN,
    LatencyModel,
    LinearModel,
    ModelShape,
    Refiner,
    RooflineModel,
    Sample,
    SampleTable,
    find_hardware,
)
from sglang_coserve.core.step_stats import StepStats

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
CAPTURED_BATCH_SIZES = (1, 2, 4, 8, *range(16, 257, 8))
BATCH = StepStats.of([(512, 100)], [1000] * 255)


def main() -> None:
    """Print one line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=80_000)
    num_samples = parser.parse_args().samples

    shape = ModelShape.from_config(LLAMA_3_1_8B)
    machine = RooflineModel.from_datasheet(shape, find_hardware("h100"))
    samples = modelled_samples(machine, num_samples)
    forms: list[LatencyModel] = [
        LinearModel.of(CONSERVE, captured_batch_sizes=CAPTURED_BATCH_SIZES),
        LinearModel.of(HYGEN),
        LinearModel.of(BROS),
        machine,
    ]
    print(f"{num_samples:,} samples; a batch of {BATCH.num_requests} requests; best of 5")
    print("model         predict  max_prefill   refine       fit   held-out error")
    for form in forms:
        print_line(form, samples)


def print_line(form: LatencyModel, samples: SampleTable) -> None:
    """Fit one model and print its times and its error."""
    fit = form.fit(samples)
    model = fit.model
    predicted_s = model.predict(BATCH)
    refiner = Refiner(model)
    sample = Sample(BATCH, predicted_s)
    predict_us = best_us(lambda: model.predict(BATCH), 5000)
    chunk_us = best_us(lambda: model.max_prefill_tokens(BATCH, 3000, 8192, 1.5 * predicted_s), 500)
    refine_us = best_us(lambda: refiner.refine(sample), 200)
    fit_ms = best_us(lambda: form.fit(samples), 1) / 1e3
    print(
        f"{model.kind:12}{predict_us:6.2f} µs{chunk_us:10.1f} µs"
        f"{refine_us:6.0f} µs{fit_ms:7.1f} ms   {fit.report}"
    )


def best_us(run: Callable[[], object], calls: int) -> float:
    """Microseconds a call takes in the best of five repetitions."""
    return min(timeit.repeat(run, number=calls, repeat=5)) / calls * 1e6


def modelled_samples(machine: LatencyModel, count: int) -> SampleTable:
    """Prefill-only, decode-only and mixed batches with the machine's noisy times."""
    rng = np.random.default_rng(0)
    num_prefills = rng.integers(0, 4, count)
    num_decodes = rng.integers(0, 257, count) * rng.integers(0, 2, count)
    num_decodes[num_prefills + num_decodes == 0] = 1
    tokens = np.exp(rng.uniform(np.log(16), np.log(4096), count)).astype(np.int64)
    context = rng.integers(0, 2, count) * rng.integers(0, 30_000, count)
    keys = np.exp(rng.uniform(np.log(16), np.log(8192), count)).astype(np.int64)
    table = SampleTable(
        prefill_requests=num_prefills,
        prefill_tokens=num_prefills * tokens,
        prefill_context_tokens=num_prefills * context,
        prefill_attention_pairs=num_prefills * tokens * (tokens + context),
        decode_requests=num_decodes,
        decode_context_tokens=num_decodes * keys,
        seconds=np.ones(count),
    )
    exact = machine.contributions(table).sum(axis=1)
    return replace(table, seconds=exact * np.exp(rng.normal(0, 0.03, count)))


if __name__ == "__main__":
    main()
