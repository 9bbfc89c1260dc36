"""FLOPs and bytes of each operator of a step, for one rank (OOCO §3.3.1); memory for KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sglang_coserve.core.latency_model.machine import Hardware
from sglang_coserve.core.latency_model.model_shape import (
    WEIGHT_BITS,
    LatentAttention,
    ModelShape,
    WeightFormat,
)
from sglang_coserve.errors import ConfigError

_VALUE_BYTES: Final = 2
_ALL_REDUCES_PER_LAYER: Final = 2

_USABLE_SHARE: Final = 0.9
"""Share of the device memory for weights and KV; about SGLang's default."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """One kind of matrix product, summed over all layers (OOCO's Table 3)."""

    row_flops: int
    """2·D_in·D_out for each row of the input."""

    row_bytes: int
    """d·(D_in + D_out) for each row."""

    weight_bytes: int
    """d·D_in·D_out, of all experts."""

    missed: float = 0.0
    """Share of the experts that a row does not go through."""

    @classmethod
    def of(
        cls,
        d_in: int,
        d_out: int,
        layers: int,
        *,
        weights: WeightFormat = "bf16",
        experts: int = 1,
        of_row: int = 1,
    ) -> Gemm:
        """Return ``layers`` products of (rows, d_in) with (d_in, d_out).

        Each row goes through ``of_row`` of ``experts`` such products.
        """
        return cls(
            row_flops=2 * d_in * d_out * layers * of_row,
            row_bytes=_VALUE_BYTES * (d_in + d_out) * layers * of_row,
            weight_bytes=WEIGHT_BITS[weights] * d_in * d_out * layers * experts // 8,
            missed=1 - of_row / experts,
        )


@dataclass(frozen=True, slots=True)
class Attention:
    """Fused attention, summed over all layers.

    Latent attention is computed as SGLang does: prefills with the keys and values of each head,
    decodes with the latent vectors.
    """

    prefill_pair_flops: int
    """4·D_h for each query–key pair."""

    decode_pair_flops: int
    query_bytes: int
    """2·d·D_h for each query: itself and its output."""

    key_bytes: int
    """2·d·D_h·H_kv/H_q for each cached token: its key and its value.

    The paper's table prints H_q/H_kv, which would make grouped queries read
    more than full heads do; its text says that they read less.
    """

    @classmethod
    def of(cls, shape: ModelShape, tp_size: int) -> Attention:
        """Return the attention of one of ``tp_size`` ranks."""
        heads, layers = shape.num_query_heads // tp_size, shape.num_layers
        if (latent := shape.latent) is not None:
            expanded = latent.nope_dim + latent.rope_dim + latent.value_dim
            absorbed = 2 * latent.kv_rank + latent.rope_dim
            return cls(
                prefill_pair_flops=2 * expanded * heads * layers,
                decode_pair_flops=2 * absorbed * heads * layers,
                query_bytes=_VALUE_BYTES * absorbed * heads * layers,
                # Every rank keeps all of it.
                key_bytes=_VALUE_BYTES * (latent.kv_rank + latent.rope_dim) * layers,
            )
        query_width = heads * shape.head_dim
        return cls(
            prefill_pair_flops=4 * query_width * layers,
            decode_pair_flops=4 * query_width * layers,
            query_bytes=2 * _VALUE_BYTES * query_width * layers,
            key_bytes=2 * _VALUE_BYTES * _kv_width(shape, tp_size) * layers,
        )


@dataclass(frozen=True, slots=True)
class Operators:
    """The operators of a step, for one rank of a tensor-parallel group."""

    layer_gemms: tuple[Gemm, ...]
    """For every token: QKV, attention output, gate and up, down; of all kinds of layers."""

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
        ring_share = 2 * (tp_size - 1) / tp_size
        return cls(
            layer_gemms=(*_attention_gemms(shape, tp_size), *_mlp_gemms(shape, tp_size)),
            lm_head=Gemm.of(shape.hidden_size, shape.vocab_size // tp_size, 1),
            attention=Attention.of(shape, tp_size),
            communication_bytes=_ALL_REDUCES_PER_LAYER
            * ring_share
            * _VALUE_BYTES
            * shape.hidden_size
            * shape.num_layers,
        )


def _kv_width(shape: ModelShape, tp_size: int) -> int:
    # With more ranks than KV heads each rank keeps a copy of one.
    return max(1, shape.num_kv_heads // tp_size) * shape.head_dim


def _attention_gemms(shape: ModelShape, tp_size: int) -> list[Gemm]:
    hidden, heads = shape.hidden_size, shape.num_query_heads // tp_size
    if shape.latent is None:
        query_width = heads * shape.head_dim
        sizes = [(hidden, query_width + 2 * _kv_width(shape, tp_size)), (query_width, hidden)]
    else:
        sizes = _latent_sizes(shape.latent, hidden, heads)
    return [Gemm.of(*size, shape.num_layers, weights=shape.weights) for size in sizes]


def _latent_sizes(latent: LatentAttention, hidden: int, heads: int) -> list[tuple[int, int]]:
    query_width = heads * (latent.nope_dim + latent.rope_dim)
    queries = [(hidden, query_width)]
    if latent.query_rank:
        queries = [(hidden, latent.query_rank), (latent.query_rank, query_width)]
    return [
        *queries,
        (hidden, latent.kv_rank + latent.rope_dim),
        # A decode multiplies with its two halves, one before and one after attention.
        (latent.kv_rank, heads * (latent.nope_dim + latent.value_dim)),
        (heads * latent.value_dim, hidden),
    ]


def _mlp_gemms(shape: ModelShape, tp_size: int) -> list[Gemm]:
    sparse_layers = shape.num_layers - shape.num_dense_layers
    gemms = []
    for width, layers, experts, of_row in (
        (shape.intermediate_size, sparse_layers, shape.num_experts, shape.experts_per_token),
        (shape.shared_intermediate_size, sparse_layers, 1, 1),
        (shape.dense_intermediate_size, shape.num_dense_layers, 1, 1),
    ):
        if width and layers:
            for size in (
                (shape.hidden_size, 2 * (width // tp_size)),
                (width // tp_size, shape.hidden_size),
            ):
                gemm = Gemm.of(*size, layers, weights=shape.weights, experts=experts, of_row=of_row)
                gemms.append(gemm)
    return gemms


def weight_bytes(shape: ModelShape) -> int:
    """Return the size of all weights."""
    operators = Operators.of(shape, 1)
    embeddings = 2 * operators.lm_head.weight_bytes
    return embeddings + sum(gemm.weight_bytes for gemm in operators.layer_gemms)


def kv_bytes_per_token(shape: ModelShape, tp_size: int) -> int:
    """Return the size of what one rank keeps of a token, over all layers."""
    return Attention.of(shape, tp_size).key_bytes


def kv_capacity_tokens(shape: ModelShape, hardware: Hardware, *, tp_size: int = 1) -> int:
    """Return the KV capacity in tokens.

    Raises:
        ConfigError: the weights leave no room.
    """
    usable_bytes = _USABLE_SHARE * hardware.memory_bytes * tp_size
    room_bytes = usable_bytes - weight_bytes(shape)
    tokens = int(room_bytes / (tp_size * kv_bytes_per_token(shape, tp_size)))
    if tokens < 1:
        raise ConfigError(
            f"{weight_bytes(shape) / 1e9:.0f} GB of weights do not fit the "
            f"{usable_bytes / 1e9:.0f} GB usable on {tp_size} x {hardware.name}: "
            "use more devices (--tp-size) or a smaller model"
        )
    return tokens
