"""FLOPs and bytes of each operator of a step, for one rank (OOCO §3.3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sglang_coserve.core.latency_model.machine import ModelShape
from sglang_coserve.errors import ConfigError

_VALUE_BYTES: Final = 2
_ALL_REDUCES_PER_LAYER: Final = 2


@dataclass(frozen=True, slots=True)
class Gemm:
    """One kind of matrix product, summed over all layers (OOCO's Table 3)."""

    row_flops: int
    """2·D_in·D_out for each row of the input."""

    row_bytes: int
    """d·(D_in + D_out) for each row."""

    weight_bytes: int
    """d·D_in·D_out, whatever the rows."""

    @classmethod
    def of(cls, d_in: int, d_out: int, layers: int, experts: int = 1, of_row: int = 1) -> Gemm:
        """Return ``layers`` products of (rows, d_in) with (d_in, d_out).

        Each row goes through ``of_row`` of ``experts`` such products. The weights of all are
        read: the rows of a few requests already reach them all.
        """
        return cls(
            row_flops=2 * d_in * d_out * layers * of_row,
            row_bytes=_VALUE_BYTES * (d_in + d_out) * layers * of_row,
            weight_bytes=_VALUE_BYTES * d_in * d_out * layers * experts,
        )


@dataclass(frozen=True, slots=True)
class Attention:
    """Fused attention, summed over all layers."""

    pair_flops: int
    """4·D_h for each query–key pair."""

    query_bytes: int
    """2·d·D_h for each query: itself and its output."""

    key_bytes: int
    """2·d·D_h·H_kv/H_q for each cached token: its key and its value.

    The paper's table prints H_q/H_kv, which would make grouped queries read
    more than full heads do; its text says that they read less.
    """


@dataclass(frozen=True, slots=True)
class Operators:
    """The operators of a step, for one rank of a tensor-parallel group."""

    layer_gemms: tuple[Gemm, ...]
    """For every token: QKV, attention output, gate and up, down."""

    lm_head: Gemm
    """For one token of each request, as no logits are computed for the others."""

    attention: Attention
    communication_bytes: float
    """Sent and received by this rank for each token, by ring all-reduces."""

    @classmethod
    def of(cls, shape: ModelShape, tp_size: int) -> Operators:
        """Return the operators of a model split over ``tp_size`` ranks as in Megatron.

        Raises:
            ConfigError: the heads cannot be split over that many ranks.
        """
        if tp_size < 1 or shape.num_query_heads % tp_size:
            raise ConfigError(
                f"{shape.num_query_heads} attention heads cannot be split over "
                f"tp_size={tp_size}: use a divisor"
            )
        layers = shape.num_layers
        query_width = shape.num_query_heads // tp_size * shape.head_dim
        # With more ranks than KV heads each rank keeps a copy of one.
        kv_width = max(1, shape.num_kv_heads // tp_size) * shape.head_dim
        mlp_width = shape.intermediate_size // tp_size
        experts = shape.num_experts, shape.experts_per_token
        ring_share = 2 * (tp_size - 1) / tp_size
        return cls(
            layer_gemms=(
                Gemm.of(shape.hidden_size, query_width + 2 * kv_width, layers),
                Gemm.of(query_width, shape.hidden_size, layers),
                Gemm.of(shape.hidden_size, 2 * mlp_width, layers, *experts),
                Gemm.of(mlp_width, shape.hidden_size, layers, *experts),
            ),
            lm_head=Gemm.of(shape.hidden_size, shape.vocab_size // tp_size, 1),
            attention=Attention(
                pair_flops=4 * query_width * layers,
                query_bytes=2 * _VALUE_BYTES * query_width * layers,
                key_bytes=2 * _VALUE_BYTES * kv_width * layers,
            ),
            communication_bytes=_ALL_REDUCES_PER_LAYER
            * ring_share
            * _VALUE_BYTES
            * shape.hidden_size
            * layers,
        )
