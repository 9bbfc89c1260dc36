"""OOCO's operator-level roofline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import ClassVar, Final, NamedTuple

import numpy as np

from sglang_coserve.core.latency_model.machine import Hardware
from sglang_coserve.core.latency_model.model import Floats, Ints, LatencyModel, SampleTable
from sglang_coserve.core.latency_model.model_shape import ModelShape
from sglang_coserve.core.latency_model.operators import Gemm, Operators
from sglang_coserve.core.latency_model.refiner import fit_rescaled
from sglang_coserve.core.step_stats import StepStats

# Assumed share of each peak that is achieved, for unfitted models and as the start of a fit.
# The two compute shares give ConServe's published prefill times for Llama-3.1-8B on an H100
# (§4.2: 51 ms for 2048 tokens, 124 ms after 40K of context). Shares of memory and the cost of an
# all-reduce give published decode times, which benchmark/results/roofline_check.md has with
# their sources. The others are assumptions.
_GEMM_COMPUTE: Final = 0.65
_PREFILL_ATTENTION_COMPUTE: Final = 0.6
_DECODE_ATTENTION_COMPUTE: Final = 0.3
_MEMORY: Final = 0.8
"""Decodes of 7B and 8B models on one A100: gpt-fast, torchao, LMDeploy, TensorRT-LLM 0.5."""

_MEMORY_OF: Final[Mapping[str, float]] = {"h100": 0.7, "h200": 0.7}
"""Decodes of the same on one H100: LLM-Inference-Bench, Tokenomics; on one H200: our profile."""

_GROUPED_KV_MEMORY: Final = 0.4
"""Of attention with fewer KV heads than query heads. 8B and 70B with much KV: LMDeploy,
LLM-Inference-Bench, Tokenomics."""

_GROUPED_KV_MEMORY_OF: Final[Mapping[str, float]] = {"h200": 0.7}
"""The same of 8B: our profile, with SGLang 0.5.17 of 2026; the others are of 2023 to 2025."""

_WITH_FP8: Final = frozenset({"h100", "h200", "b200"})
"""Their datasheets have twice the FLOP/s for FP8; others compute in BF16 with such weights."""

_ALL_REDUCE_S: Final = 25e-6
"""Beside its bytes. 70B at batch 1: TensorRT-LLM (in LLM-Inference-Bench), vLLM (in Tokenomics),
gpt-fast."""

_LINK: Final = 0.7
_STEP_S: Final = 1e-3
_REQUEST_S: Final = 1e-6

_GemmLine = tuple[float, float, float, float]
"""Seconds to compute a row, to read and write a row, and to read the weights; ``Gemm.missed``."""


class _Costs(NamedTuple):
    """What the coefficients make of the operators, in seconds where nothing else is said."""

    layer_gemms: tuple[_GemmLine, ...]
    lm_head: _GemmLine
    token_s: float
    """Of communication."""

    prefill_pair_s: float
    decode_pair_s: float
    kv_byte_s: float
    query_bytes: int
    key_bytes: int
    prefill_step_s: float
    decode_step_s: float
    prefill_request_s: float
    decode_request_s: float

    @classmethod
    def of(cls, operators: Operators, coefficients: Mapping[str, float]) -> _Costs:
        flop_s, byte_s, prefill_flop_s, decode_flop_s, kv_byte_s, link_s, *static_s = (
            coefficients.values()
        )

        def line(gemm: Gemm) -> _GemmLine:
            weight_s = byte_s * gemm.weight_bytes
            return flop_s * gemm.row_flops, byte_s * gemm.row_bytes, weight_s, gemm.missed

        attention = operators.attention
        return cls(
            tuple(map(line, operators.layer_gemms)),
            line(operators.lm_head),
            link_s * operators.communication_bytes,
            prefill_flop_s * attention.prefill_pair_flops,
            decode_flop_s * attention.decode_pair_flops,
            kv_byte_s,
            attention.query_bytes,
            attention.key_bytes,
            *static_s,
        )


@dataclass(frozen=True, slots=True)
class RooflineModel(LatencyModel):
    """Sums max(FLOPs / F, bytes / M) over the operators of a step (OOCO §3.3).

    The coefficients are the inverses of those in the paper's Table 4, so that all of
    them are seconds per unit: of F_g, M_g, F_ap, F_ad, M_a, B_c, O_p and O_d, in this order. A
    batch with prefills and decodes pays the larger of the two static overheads, O. Each request
    adds a cost of its own, which the paper does not have (see ``PolynomialModel``). Built from the
    model's config and the device's datasheet, it can predict before anything was
    measured; ``fit`` replaces the assumed efficiencies by measured ones.
    """

    shape: ModelShape
    hardware: Hardware
    tp_size: int

    coefficients: Mapping[str, float]

    _costs: _Costs = field(init=False, repr=False, compare=False)

    kind: ClassVar[str] = "roofline"

    def __post_init__(self) -> None:
        self.assert_coefficients()
        costs = _Costs.of(Operators.of(self.shape, self.tp_size), self.coefficients)
        object.__setattr__(self, "_costs", costs)

    @classmethod
    def from_datasheet(
        cls, shape: ModelShape, hardware: Hardware, *, tp_size: int = 1
    ) -> RooflineModel:
        """Return a model with assumed efficiencies, which may be used as it is or fitted.

        Raises:
            ConfigError: the model cannot be split over ``tp_size`` devices.
        """
        speedup = 2.0 if shape.weights == "fp8" and hardware.name in _WITH_FP8 else 1.0
        memory = _MEMORY_OF.get(hardware.name, _MEMORY)
        has_groups = shape.num_kv_heads < shape.num_query_heads
        grouped = _GROUPED_KV_MEMORY_OF.get(hardware.name, _GROUPED_KV_MEMORY)
        kv_memory = min(memory, grouped) if has_groups else memory
        all_reduces = 2 * shape.num_layers if tp_size > 1 else 0
        step_s = _STEP_S + all_reduces * _ALL_REDUCE_S
        flop_per_s, byte_per_s = hardware.bf16_flop_per_s, hardware.memory_byte_per_s
        coefficients = {
            "gemm_flop_s": 1 / (_GEMM_COMPUTE * speedup * flop_per_s),
            "gemm_byte_s": 1 / (memory * byte_per_s),
            "prefill_attention_flop_s": 1 / (_PREFILL_ATTENTION_COMPUTE * flop_per_s),
            "decode_attention_flop_s": 1 / (_DECODE_ATTENTION_COMPUTE * flop_per_s),
            "attention_byte_s": 1 / (kv_memory * byte_per_s),
            "communication_byte_s": 1 / (_LINK * hardware.link_byte_per_s),
            "prefill_step_s": step_s,
            "decode_step_s": step_s,
            "prefill_request_s": _REQUEST_S,
            "decode_request_s": _REQUEST_S,
        }
        return cls(shape, hardware, tp_size, coefficients)

    def predict(self, batch: StepStats) -> float:
        """See ``LatencyModel.predict``."""
        # Called tens of times per step: conditional expressions take half the time of ``max``.
        prefills, prefill_tokens, prefill_context, pairs, decodes, decode_keys = batch
        requests = prefills + decodes
        if not requests:
            return 0.0
        costs = self._costs
        tokens = prefill_tokens + decodes
        seconds = (
            costs.token_s * tokens
            + costs.prefill_request_s * prefills
            + costs.decode_request_s * decodes
        )
        for row_compute_s, row_memory_s, weight_s, missed in costs.layer_gemms:
            if missed:
                # Experts that no row goes through are not read, if rows choose independently.
                weight_s *= 1.0 - missed**tokens
            compute_s, memory_s = row_compute_s * tokens, weight_s + row_memory_s * tokens
            seconds += compute_s if compute_s > memory_s else memory_s
        row_compute_s, row_memory_s, weight_s, _ = costs.lm_head
        compute_s, memory_s = row_compute_s * requests, weight_s + row_memory_s * requests
        seconds += compute_s if compute_s > memory_s else memory_s
        step_s = 0.0
        if prefills:
            keys = prefill_tokens + prefill_context
            compute_s = costs.prefill_pair_s * pairs
            moved = costs.query_bytes * prefill_tokens + costs.key_bytes * keys
            memory_s = costs.kv_byte_s * moved
            seconds += compute_s if compute_s > memory_s else memory_s
            step_s = costs.prefill_step_s
        if decodes:
            compute_s = costs.decode_pair_s * decode_keys
            moved = costs.query_bytes * decodes + costs.key_bytes * decode_keys
            memory_s = costs.kv_byte_s * moved
            seconds += compute_s if compute_s > memory_s else memory_s
            if step_s < costs.decode_step_s:
                step_s = costs.decode_step_s
        return seconds + step_s

    def contributions(self, table: SampleTable) -> Floats:
        """See ``LatencyModel.contributions``; the smaller side of each maximum contributes 0."""
        costs = self._costs
        gemm_compute_s, gemm_memory_s = _gemm(costs.lm_head, table.num_requests)
        for line in costs.layer_gemms:
            compute_s, memory_s = _gemm(line, table.compute_tokens)
            gemm_compute_s += compute_s
            gemm_memory_s += memory_s
        query_bytes, key_bytes = costs.query_bytes, costs.key_bytes
        keys = table.prefill_tokens + table.prefill_context_tokens
        prefill_compute_s, prefill_memory_s = _larger(
            costs.prefill_pair_s * table.prefill_attention_pairs,
            costs.kv_byte_s * (query_bytes * table.prefill_tokens + key_bytes * keys),
        )
        keys = table.decode_context_tokens
        decode_compute_s, decode_memory_s = _larger(
            costs.decode_pair_s * keys,
            costs.kv_byte_s * (query_bytes * table.decode_requests + key_bytes * keys),
        )
        prefill_step_s, decode_step_s = _larger(
            costs.prefill_step_s * (table.prefill_requests > 0),
            costs.decode_step_s * (table.decode_requests > 0),
        )
        return np.vstack(
            [
                gemm_compute_s,
                gemm_memory_s,
                prefill_compute_s,
                decode_compute_s,
                prefill_memory_s + decode_memory_s,
                costs.token_s * table.compute_tokens,
                prefill_step_s,
                decode_step_s,
                costs.prefill_request_s * table.prefill_requests,
                costs.decode_request_s * table.decode_requests,
            ]
        ).T

    def fitted(self, table: SampleTable) -> RooflineModel:
        """See ``LatencyModel.fitted``.

        Few samples are enough: a coefficient that they do not determine stays
        near its current value.
        """
        return fit_rescaled(self, table)

    def form(self) -> dict[str, object]:
        """See ``LatencyModel.form``."""
        shape = asdict(self.shape)
        # Profiles of a dense model are as they were before there were others.
        defaults = {field.name: field.default for field in fields(self.shape)}
        return {
            "shape": {name: value for name, value in shape.items() if value != defaults[name]},
            "hardware": asdict(self.hardware),
            "tp_size": self.tp_size,
        }


def _gemm(line: _GemmLine, rows: Ints) -> tuple[Floats, Floats]:
    row_compute_s, row_memory_s, weight_s, missed = line
    read_s = weight_s * (1.0 - missed**rows) if missed else weight_s
    return _larger(row_compute_s * rows, read_s + row_memory_s * rows)


def _larger(left_s: Floats, right_s: Floats) -> tuple[Floats, Floats]:
    """Return both arrays, with the smaller value of each pair set to zero."""
    # Multiplying by the mask is several times faster than np.where on mixed batches.
    left_wins = left_s > right_s
    return left_s * left_wins, right_s * ~left_wins
