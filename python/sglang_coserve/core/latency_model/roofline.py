"""OOCO's operator-level roofline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import ClassVar, Final

import numpy as np

from sglang_coserve.core.latency_model.machine import Hardware
from sglang_coserve.core.latency_model.model import (
    Floats,
    Ints,
    LatencyModel,
    SampleTable,
    longest_prefill,
    solve_chunk,
)
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

_COEFFICIENTS: Final = (
    "gemm_flop_s",
    "gemm_byte_s",
    "prefill_attention_flop_s",
    "decode_attention_flop_s",
    "attention_byte_s",
    "communication_byte_s",
    "prefill_step_s",
    "decode_step_s",
    "prefill_request_s",
    "decode_request_s",
)

_GemmLine = tuple[float, float, float, float]
"""Seconds to compute a row, to read and write a row, and to read the weights; ``Gemm.missed``."""


@dataclass(frozen=True, slots=True)
class RooflineModel(LatencyModel):
    """Sums max(FLOPs / F, bytes / M) over the operators of a step (OOCO §3.3).

    The coefficients are the inverses of those in the paper's Table 4, so that all of
    them are seconds per unit. A batch with prefills and decodes pays the
    larger of the two static overheads. Each request adds a cost of its own, which
    the paper does not have (see ``CONSERVE``). Built from the
    model's config and the device's datasheet, it can predict before anything was
    measured; ``fit`` replaces the assumed efficiencies by measured ones.
    """

    shape: ModelShape
    hardware: Hardware
    tp_size: int

    gemm_flop_s: float
    """1 / F_g."""

    gemm_byte_s: float
    """1 / M_g."""

    prefill_attention_flop_s: float
    """1 / F_ap."""

    decode_attention_flop_s: float
    """1 / F_ad."""

    attention_byte_s: float
    """1 / M_a."""

    communication_byte_s: float
    """1 / B_c."""

    prefill_step_s: float
    """O_p."""

    decode_step_s: float
    """O_d."""

    prefill_request_s: float
    """Cost of each prefill."""

    decode_request_s: float
    """Cost of each decode."""

    _operators: Operators = field(init=False, repr=False, compare=False)
    _layer_gemm_lines: tuple[_GemmLine, ...] = field(init=False, repr=False, compare=False)
    _lm_head_line: _GemmLine = field(init=False, repr=False, compare=False)
    _per_token_s: float = field(init=False, repr=False, compare=False)
    """Communication time per token."""

    _token_s: float = field(init=False, repr=False, compare=False)
    """Time per token in the layers, for large batches."""

    _prefill_pair_s: float = field(init=False, repr=False, compare=False)
    _decode_pair_s: float = field(init=False, repr=False, compare=False)

    kind: ClassVar[str] = "roofline"

    def __post_init__(self) -> None:
        self.assert_coefficients()
        operators = Operators.of(self.shape, self.tp_size)
        object.__setattr__(self, "_operators", operators)
        lines = tuple(self._line(gemm) for gemm in operators.layer_gemms)
        object.__setattr__(self, "_layer_gemm_lines", lines)
        object.__setattr__(self, "_lm_head_line", self._line(operators.lm_head))
        per_token_s = self.communication_byte_s * operators.communication_bytes
        object.__setattr__(self, "_per_token_s", per_token_s)
        token_s = per_token_s + sum(max(line[:2]) for line in lines)
        object.__setattr__(self, "_token_s", token_s)
        attention = operators.attention
        prefill_pair_s = self.prefill_attention_flop_s * attention.prefill_pair_flops
        object.__setattr__(self, "_prefill_pair_s", prefill_pair_s)
        decode_pair_s = self.decode_attention_flop_s * attention.decode_pair_flops
        object.__setattr__(self, "_decode_pair_s", decode_pair_s)

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
        return cls(
            shape,
            hardware,
            tp_size,
            gemm_flop_s=1 / (_GEMM_COMPUTE * speedup * hardware.bf16_flop_per_s),
            gemm_byte_s=1 / (memory * hardware.memory_byte_per_s),
            prefill_attention_flop_s=1 / (_PREFILL_ATTENTION_COMPUTE * hardware.bf16_flop_per_s),
            decode_attention_flop_s=1 / (_DECODE_ATTENTION_COMPUTE * hardware.bf16_flop_per_s),
            attention_byte_s=1 / (kv_memory * hardware.memory_byte_per_s),
            communication_byte_s=1 / (_LINK * hardware.link_byte_per_s),
            prefill_step_s=step_s,
            decode_step_s=step_s,
            prefill_request_s=_REQUEST_S,
            decode_request_s=_REQUEST_S,
        )

    @property
    def coefficients(self) -> dict[str, float]:
        """See ``LatencyModel.coefficients``."""
        return {name: getattr(self, name) for name in _COEFFICIENTS}

    def with_coefficients(self, values: Mapping[str, float]) -> RooflineModel:
        """See ``LatencyModel.with_coefficients``."""
        coefficients = {**self.coefficients, **values}
        return RooflineModel(self.shape, self.hardware, self.tp_size, **coefficients)

    def predict(self, batch: StepStats) -> float:
        """See ``LatencyModel.predict``."""
        # Called tens of times per step: conditional expressions take half the time of ``max``.
        prefills, prefill_tokens, prefill_context, pairs, decodes, decode_keys = batch
        requests = prefills + decodes
        if not requests:
            return 0.0
        tokens = prefill_tokens + decodes
        seconds = (
            self._per_token_s * tokens
            + self.prefill_request_s * prefills
            + self.decode_request_s * decodes
        )
        for row_compute_s, row_memory_s, weight_s, missed in self._layer_gemm_lines:
            if missed:
                # Experts that no row goes through are not read, if rows choose independently.
                weight_s *= 1.0 - missed**tokens
            compute_s, memory_s = row_compute_s * tokens, weight_s + row_memory_s * tokens
            seconds += compute_s if compute_s > memory_s else memory_s
        row_compute_s, row_memory_s, weight_s, _ = self._lm_head_line
        compute_s, memory_s = row_compute_s * requests, weight_s + row_memory_s * requests
        seconds += compute_s if compute_s > memory_s else memory_s
        attention = self._operators.attention
        step_s = 0.0
        if prefills:
            keys = prefill_tokens + prefill_context
            compute_s = self._prefill_pair_s * pairs
            moved = attention.query_bytes * prefill_tokens + attention.key_bytes * keys
            memory_s = self.attention_byte_s * moved
            seconds += compute_s if compute_s > memory_s else memory_s
            step_s = self.prefill_step_s
        if decodes:
            compute_s = self._decode_pair_s * decode_keys
            moved = attention.query_bytes * decodes + attention.key_bytes * decode_keys
            memory_s = self.attention_byte_s * moved
            seconds += compute_s if compute_s > memory_s else memory_s
            if step_s < self.decode_step_s:
                step_s = self.decode_step_s
        return seconds + step_s

    def max_prefill_tokens(
        self, batch: StepStats, context_tokens: int, limit_tokens: int, budget_s: float
    ) -> int:
        """See ``LatencyModel.max_prefill_tokens``; searches from a closed-form estimate."""
        if limit_tokens <= 0:
            return 0
        whole_s = self.predict(batch.with_prefill(limit_tokens, context_tokens))
        if whole_s <= budget_s:
            return limit_tokens
        # Assume compute-bound operators: m of n tokens less take m·(2n + C) - m² off ΣP·(P + C).
        slope_s = self._token_s + self._prefill_pair_s * (context_tokens + 2 * limit_tokens)
        less = solve_chunk(whole_s - budget_s, slope_s, -self._prefill_pair_s)
        tokens = limit_tokens - math.ceil(min(less, limit_tokens - 1))
        return longest_prefill(self, batch, context_tokens, limit_tokens, budget_s, tokens)

    def contributions(self, table: SampleTable) -> Floats:
        """See ``LatencyModel.contributions``; the smaller side of each maximum contributes 0."""
        attention = self._operators.attention
        gemm_compute_s, gemm_memory_s = self._gemm(self._operators.lm_head, table.num_requests)
        for gemm in self._operators.layer_gemms:
            compute_s, memory_s = self._gemm(gemm, table.compute_tokens)
            gemm_compute_s += compute_s
            gemm_memory_s += memory_s
        keys = table.prefill_tokens + table.prefill_context_tokens
        prefill_compute_s, prefill_memory_s = _larger(
            self._prefill_pair_s * table.prefill_attention_pairs,
            self.attention_byte_s
            * (attention.query_bytes * table.prefill_tokens + attention.key_bytes * keys),
        )
        keys = table.decode_context_tokens
        decode_compute_s, decode_memory_s = _larger(
            self._decode_pair_s * keys,
            self.attention_byte_s
            * (attention.query_bytes * table.decode_requests + attention.key_bytes * keys),
        )
        prefill_step_s, decode_step_s = _larger(
            self.prefill_step_s * (table.prefill_requests > 0),
            self.decode_step_s * (table.decode_requests > 0),
        )
        communication_s = (
            self.communication_byte_s * self._operators.communication_bytes * table.compute_tokens
        )
        return np.vstack(
            [
                gemm_compute_s,
                gemm_memory_s,
                prefill_compute_s,
                decode_compute_s,
                prefill_memory_s + decode_memory_s,
                communication_s,
                prefill_step_s,
                decode_step_s,
                self.prefill_request_s * table.prefill_requests,
                self.decode_request_s * table.decode_requests,
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

    def _line(self, gemm: Gemm) -> _GemmLine:
        return (
            self.gemm_flop_s * gemm.row_flops,
            self.gemm_byte_s * gemm.row_bytes,
            self.gemm_byte_s * gemm.weight_bytes,
            gemm.missed,
        )

    def _gemm(self, gemm: Gemm, rows: Ints) -> tuple[Floats, Floats]:
        row_compute_s, row_memory_s, weight_s, missed = self._line(gemm)
        read_s = weight_s * (1.0 - missed**rows) if missed else weight_s
        return _larger(row_compute_s * rows, read_s + row_memory_s * rows)


def _larger(left_s: Floats, right_s: Floats) -> tuple[Floats, Floats]:
    """Return both arrays, with the smaller value of each pair set to zero."""
    # Multiplying by the mask is several times faster than np.where on mixed batches.
    left_wins = left_s > right_s
    return left_s * left_wins, right_s * ~left_wins
