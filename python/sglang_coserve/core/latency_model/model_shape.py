"""The dimensions of a language model, by name or from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal

from pydantic import AliasChoices, Field, NonNegativeInt, PositiveInt, ValidationError

from sglang_coserve.core.latency_model.machine import named
from sglang_coserve.core.validation import JsonDocument, explain
from sglang_coserve.errors import ConfigError

WeightFormat = Literal["bf16", "fp8", "int8", "int4"]
"""Of the layers' weights. Those of 8 and 4 bit integers are computed with in BF16."""

WEIGHT_BITS: Final[Mapping[WeightFormat, int]] = MappingProxyType(
    {"bf16": 16, "fp8": 8, "int8": 8, "int4": 4}
)

_SUPPORTED: Final = (
    *("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"),
    *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
)
_ADVICE: Final = "measure a profile of another kind on this model instead"


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention: the KV cache has one vector for all heads (DeepSeek-V2 §2.1)."""

    kv_rank: PositiveInt
    rope_dim: PositiveInt
    """Dimensions of a key that are rotated, and are the same for all heads."""

    nope_dim: PositiveInt
    """Dimensions of a head's key that are not."""

    value_dim: PositiveInt
    query_rank: NonNegativeInt = 0
    """Rank of the queries' projection; 0 if it is one matrix."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder: grouped-query or latent attention, and a gated MLP or experts, in each layer."""

    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_query_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    """Of a query; with latent attention ``latent`` has what counts."""

    intermediate_size: PositiveInt
    """Of an MLP, or of one expert."""

    vocab_size: PositiveInt
    num_experts: PositiveInt = 1
    """MLPs of a layer; their router is not counted."""

    experts_per_token: PositiveInt = 1
    shared_intermediate_size: NonNegativeInt = 0
    """Of the experts that every token goes through, together."""

    num_dense_layers: NonNegativeInt = 0
    """The first layers, which have an MLP instead of experts."""

    dense_intermediate_size: NonNegativeInt = 0
    """Of that MLP."""

    weights: WeightFormat = "bf16"
    """Embeddings, activations and KV always take 16 bits."""

    latent: LatentAttention | None = None

    @classmethod
    def from_config(
        cls, config: Mapping[str, object], source: str = "the model's config.json"
    ) -> ModelShape:
        """Read a Hugging Face config.

        Raises:
            ConfigError: the architecture is not supported (sliding-window attention, experts in
                some of the layers only, another quantization, another family), or a dimension is
                missing or malformed.
        """
        architectures = config.get("architectures")
        if not isinstance(architectures, list) or not set(architectures) & set(_SUPPORTED):
            raise ConfigError(
                f"{source}: architectures: {architectures} is not one of "
                f"{', '.join(_SUPPORTED)}: {_ADVICE}"
            )
        if config.get("use_sliding_window"):
            raise ConfigError(
                f"{source}: use_sliding_window: window attention is not modelled: {_ADVICE}"
            )
        every_layer = {"mlp_only_layers": [], "decoder_sparse_step": 1, "moe_layer_freq": 1}
        for name, usual in every_layer.items():
            if config.get(name, usual) != usual:
                raise ConfigError(
                    f"{source}: {name}: layers with and without experts, other than the first, "
                    f"are not modelled: {_ADVICE}"
                )
        try:
            dimensions = _Dimensions.model_validate(config)
            latent = None
            if config.get("kv_lora_rank") is not None:
                latent = _Latent.model_validate(config).attention()
        except ValidationError as error:
            raise ConfigError(f"{source}: {explain(error)}") from error
        return dimensions.shape(source, _weight_format(config, source), latent)


class _Dimensions(JsonDocument):
    """The dimensions in a Hugging Face config, under its names."""

    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    intermediate_size: PositiveInt
    vocab_size: PositiveInt
    num_experts: PositiveInt = Field(
        1, validation_alias=AliasChoices("num_local_experts", "num_experts", "n_routed_experts")
    )
    num_experts_per_tok: PositiveInt = 1
    moe_intermediate_size: PositiveInt | None = None
    n_shared_experts: NonNegativeInt | None = None
    shared_expert_intermediate_size: NonNegativeInt | None = None
    first_k_dense_replace: NonNegativeInt = 0

    def shape(
        self, source: str, weights: WeightFormat, latent: LatentAttention | None
    ) -> ModelShape:
        heads = self.num_attention_heads
        kv_heads = self.num_key_value_heads or heads
        if heads % kv_heads:
            raise ConfigError(
                f"{source}: num_key_value_heads: {kv_heads} does not divide {heads} heads"
            )
        if self.hidden_size < heads:
            raise ConfigError(
                f"{source}: hidden_size: {self.hidden_size} is too small for {heads} heads"
            )
        dense = ModelShape(
            hidden_size=self.hidden_size,
            num_layers=self.num_hidden_layers,
            num_query_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=self.head_dim or self.hidden_size // heads,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            weights=weights,
            latent=latent,
        )
        if self.num_experts == 1:
            return dense
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"{source}: num_experts_per_tok: {self.num_experts_per_tok} is more than "
                f"the {self.num_experts} experts"
            )
        expert_size = self.moe_intermediate_size or self.intermediate_size
        shared_size = (self.n_shared_experts or 0) * expert_size
        return replace(
            dense,
            intermediate_size=expert_size,
            num_experts=self.num_experts,
            experts_per_token=self.num_experts_per_tok,
            shared_intermediate_size=self.shared_expert_intermediate_size or shared_size,
            num_dense_layers=self.first_k_dense_replace,
            dense_intermediate_size=self.intermediate_size if self.first_k_dense_replace else 0,
        )


class _Latent(JsonDocument):
    kv_lora_rank: PositiveInt
    q_lora_rank: PositiveInt | None = None
    qk_rope_head_dim: PositiveInt
    qk_nope_head_dim: PositiveInt
    v_head_dim: PositiveInt

    def attention(self) -> LatentAttention:
        return LatentAttention(
            kv_rank=self.kv_lora_rank,
            rope_dim=self.qk_rope_head_dim,
            nope_dim=self.qk_nope_head_dim,
            value_dim=self.v_head_dim,
            query_rank=self.q_lora_rank or 0,
        )


def _weight_format(config: Mapping[str, object], source: str) -> WeightFormat:
    quantization = config.get("quantization_config")
    match quantization:
        case None:
            return "bf16"
        case {"quant_method": "fp8"}:
            return "fp8"
        case {"quant_method": "awq" | "gptq", "bits": 8}:
            return "int8"
        case {"quant_method": "awq" | "gptq", "bits": 4}:
            return "int4"
    found = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    raise ConfigError(
        f"{source}: quantization_config: {found!r} is not modelled, only fp8, and awq and gptq "
        f"with 4 or 8 bits: {_ADVICE}"
    )


# hidden_size, num_layers, num_query_heads, num_kv_heads, head_dim, intermediate_size,
# vocab_size, and the numbers of experts and of those of a token, as the config.json published with
# each model states them.
MODELS: Final = MappingProxyType(
    {
        "llama-2-7b": ModelShape(4096, 32, 32, 32, 128, 11008, 32000),
        "llama-3.1-8b": ModelShape(4096, 32, 32, 8, 128, 14336, 128256),
        "llama-3.1-70b": ModelShape(8192, 80, 64, 8, 128, 28672, 128256),
        "mistral-7b": ModelShape(4096, 32, 32, 8, 128, 14336, 32000),
        "mixtral-8x7b": ModelShape(4096, 32, 32, 8, 128, 14336, 32000, 8, 2),
        "qwen-14b": ModelShape(5120, 40, 40, 40, 128, 13696, 152064),
        "qwen2.5-7b": ModelShape(3584, 28, 28, 4, 128, 18944, 152064),
        "qwen2.5-14b": ModelShape(5120, 48, 40, 8, 128, 13824, 152064),
        "qwen2.5-32b": ModelShape(5120, 64, 40, 8, 128, 27648, 152064),
        "qwen2.5-72b": ModelShape(8192, 80, 64, 8, 128, 29568, 152064),
        "yi-34b": ModelShape(7168, 60, 56, 8, 128, 20480, 64000),
    }
)
"""The models known by name, with weights of 16 bits; no embedding is tied."""


def find_model(name: str) -> ModelShape:
    """Return the model of this name, in any letter case.

    Raises:
        ConfigError: the name is not known; the message lists the known ones.
    """
    return named(MODELS, name, "model", ", or the path of a config.json")
