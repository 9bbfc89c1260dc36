"""Machines with known costs, and batches to run on them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from sglang_coserve.core.latency_model.machine import HARDWARE
from sglang_coserve.core.latency_model.model import LatencyModel, Sample, SampleTable
from sglang_coserve.core.latency_model.model_shape import ModelShape, find_model
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.core.latency_model.roofline import RooflineModel
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
CAPTURED = (1, 2, 4, 8, *range(16, 161, 8))

# Costs of the order of an 8B model on one H100, so that every term matters somewhere. Decodes
# cost less in a replayed graph than in any mixed batch, as they do on a real machine.
COSTS = {
    "compute_token_s": 2.5e-5,
    "attention_pair_s": 8e-10,
    "context_token_s": 4e-8,
    "prefill_request_s": 5e-4,
    "decode_request_s": 2e-5,
    "iteration_s": 6e-3,
}
POLYNOMIAL = PolynomialModel.of(
    **COSTS,
    graph_row_s=1.5e-5,
    graph_context_token_s=4e-8,
    graph_iteration_s=4e-3,
    captured_batch_sizes=CAPTURED,
)
EAGER_POLYNOMIAL = PolynomialModel.of(**COSTS)
QWEN_3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8"},
}

ROOFLINE = RooflineModel.from_datasheet(ModelShape.from_config(LLAMA_3_1_8B), HARDWARE["h100"])
MACHINES: tuple[LatencyModel, ...] = (
    POLYNOMIAL,
    EAGER_POLYNOMIAL,
    ROOFLINE,
)


def machine_id(model: LatencyModel) -> str:
    return "eager_polynomial" if model is EAGER_POLYNOMIAL else model.kind


def unfitted(model: LatencyModel) -> LatencyModel:
    """The form of a machine: what a profiler starts from."""
    if isinstance(model, RooflineModel):
        return RooflineModel.from_datasheet(model.shape, model.hardware, tp_size=model.tp_size)
    return model.with_coefficients(dict.fromkeys(model.coefficients, 0.0))


def random_batches(n: int, seed: int, *, prefills: bool = True) -> SampleTable:
    """Prefill-only, decode-only and mixed batches; the times are not yet measured."""
    rng = np.random.default_rng(seed)
    num_prefills = rng.integers(0, 4, n) * prefills
    num_decodes = rng.integers(0, 200, n) * rng.integers(0, 2, n)
    num_decodes[num_prefills + num_decodes == 0] = 1
    # All prefills of a batch have one length here: sums are then products.
    tokens = np.exp(rng.uniform(np.log(16), np.log(4096), n)).astype(np.int64)
    context = rng.integers(0, 2, n) * rng.integers(0, 30000, n)
    keys = np.exp(rng.uniform(np.log(16), np.log(8192), n)).astype(np.int64)
    return SampleTable(
        prefill_requests=num_prefills,
        prefill_tokens=num_prefills * tokens,
        prefill_context_tokens=num_prefills * context,
        prefill_attention_pairs=num_prefills * tokens * (tokens + context),
        decode_requests=num_decodes,
        decode_context_tokens=num_decodes * keys,
        seconds=np.ones(n),
    )


def measure(
    machine: LatencyModel, table: SampleTable, seed: int, *, noise: float = 0.03
) -> SampleTable:
    """The times of a machine, with log-normal noise."""
    rng = np.random.default_rng(seed)
    exact = machine.contributions(table).sum(axis=1)
    return replace(table, seconds=exact * np.exp(rng.normal(0, noise, len(table))))


def as_samples(table: SampleTable) -> list[Sample]:
    columns = [getattr(table, name) for name in StepStats._fields]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [
        Sample(StepStats(*row), seconds)
        for row, seconds in zip(rows, table.seconds.tolist(), strict=True)
    ]


def error_of(model: LatencyModel, machine: LatencyModel, table: SampleTable) -> float:
    """MAPE against the exact times of the machine."""
    exact = machine.contributions(table).sum(axis=1)
    return float(np.abs(model.contributions(table).sum(axis=1) / exact - 1).mean())


@dataclass(frozen=True)
class BatchLengths:
    """The lengths of a batch's requests."""

    prefills: tuple[tuple[int, int], ...]
    decodes: tuple[int, ...]

    @property
    def stats(self) -> StepStats:
        return StepStats.of(self.prefills, self.decodes)


_tokens = st.integers(1, 20_000)
_context = st.integers(0, 200_000)
any_batch = st.builds(
    BatchLengths,
    prefills=st.lists(st.tuples(_tokens, _context), max_size=4).map(tuple),
    decodes=st.lists(_context, max_size=12).map(tuple),
)
_seconds_per_unit = st.just(0.0) | st.floats(1e-14, 1e-2)
_captured = st.lists(st.integers(1, 20), unique=True, max_size=5).map(lambda x: tuple(sorted(x)))
_shapes = st.sampled_from(["llama-3.1-8b", "qwen2.5-7b"]).map(find_model)


@st.composite
def models(draw: st.DrawFn) -> LatencyModel:
    """Any model of any kind, with coefficients that need not make sense."""
    form: LatencyModel = draw(
        st.one_of(
            st.builds(PolynomialModel.of, captured_batch_sizes=_captured),
            st.builds(
                RooflineModel.from_datasheet,
                shape=_shapes,
                hardware=st.sampled_from(list(HARDWARE.values())),
                tp_size=st.sampled_from([1, 2, 4]),
            ),
        )
    )
    values = {name: draw(_seconds_per_unit) for name in form.coefficients}
    return form.with_coefficients(values)
