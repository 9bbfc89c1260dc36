"""A machine whose times are known: an executor that computes them from a latency model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.profiler.fits import ProfiledMachine
from sglang_coserve.profiler.shapes import ExecutorLimits, StepShape

LIMITS = ExecutorLimits(
    max_batch_tokens=2048, max_request_tokens=8192, max_requests=64, kv_capacity_tokens=65536
)

POLYNOMIAL = PolynomialModel.of(
    compute_token_s=8e-5, attention_pair_s=5e-8, context_token_s=2e-6, iteration_s=4e-3
)

MACHINE = ProfiledMachine(
    hardware="CPU Modelled, 2 cores, 1 threads",
    model="small",
    tp_size=1,
    sglang_version="0.5.17",
    model_config={
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 704,
        "vocab_size": 1000,
    },
    captured_batch_sizes=(),
)


@dataclass
class ModelledExecutor:
    """Runs no batch but tells how long it took, on a clock of its own."""

    limits: ExecutorLimits = LIMITS
    model: LatencyModel = POLYNOMIAL
    noise: float = 0.0
    """Standard deviation of a run's relative error."""

    now_s: float = 0.0
    runs: list[StepShape] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(0)

    def run(self, shape: StepShape) -> float:
        assert self.limits.allow(shape)
        seconds = self.model.predict(shape.stats) * self._random.gauss(1, self.noise)
        self.now_s += seconds
        self.runs.append(shape)
        return seconds

    def clock(self) -> float:
        return self.now_s
