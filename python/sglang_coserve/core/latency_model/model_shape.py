"""The dimensions of a language model, by name or from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Final, Literal

from sglang_coserve.core.latency_model.machine import named
from sglang_coserve.core.ranges import NOT_NEGATIVE, POSITIVE, Range, check_ranges
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
    """Multi-head latent attention: the KV cache has one vector for all heads (DeepSeek-V2 §2.1).

    Raises:
        ConfigError: on construction, when a dimension is out of range; the message names it.
    """

    kv_rank: Annotated[int, POSITIVE]
    rope_dim: Annotated[int, POSITIVE]
    """Dimensions of a key that are rotated, and are the same for all heads."""

    nope_dim: Annotated[int, POSITIVE]
    """Dimensions of a head's key that are not."""

    value_dim: Annotated[int, POSITIVE]
    query_rank: Annotated[int, NOT_NEGATIVE] = 0
    """Rank of the queries' projection; 0 if it is one matrix."""

    def __post_init__(self) -> None:
        check_ranges(self, "latent attention: {}".format)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder: grouped-query or latent attention, and a gated MLP or experts, in each layer.

    Raises:
        ConfigError: on construction, when a dimension is out of range; the message names it.
    """

    hidden_size: Annotated[int, POSITIVE]
    num_layers: Annotated[int, POSITIVE]
    num_query_heads: Annotated[int, POSITIVE]
    num_kv_heads: Annotated[int, POSITIVE]
    head_dim: Annotated[int, POSITIVE]
    """Of a query; with latent attention ``latent`` has what counts."""

    intermediate_size: Annotated[int, POSITIVE]
    """Of an MLP, or of one expert."""

    vocab_size: Annotated[int, POSITIVE]
    num_experts: Annotated[int, POSITIVE] = 1
    """MLPs of a layer; their router is not counted."""

    experts_per_token: Annotated[int, POSITIVE] = 1
    shared_intermediate_size: Annotated[int, NOT_NEGATIVE] = 0
    """Of the experts that every token goes through, together."""

    num_dense_layers: Annotated[int, NOT_NEGATIVE] = 0
    """The first layers, which have an MLP instead of experts."""

    dense_intermediate_size: Annotated[int, NOT_NEGATIVE] = 0
    """Of that MLP."""

    weights: WeightFormat = "bf16"
    """Embeddings, activations and KV always take 16 bits."""

    latent: LatentAttention | None = None

    def __post_init__(self) -> None:
        check_ranges(self, "model shape: {}".format)

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
        dimensions = _Dimensions(config, source)
        return dimensions.with_experts(dimensions.dense(_weight_format(config, source)))


@dataclass(frozen=True, slots=True)
class _Dimensions:
    """Reads the dimensions in a Hugging Face config, under its names."""

    config: Mapping[str, object]
    source: str

    def read(self, name: str, default: int | None = None, range_: Range = POSITIVE) -> int:
        """Return a dimension; the default, if there is one, where it is missing or null."""
        value = self.config.get(name)
        if value is None and default is not None:
            return default
        if name not in self.config:
            raise self.error(f"{name}: this field is missing")
        if fault := range_.fault(value, is_whole=True):
            raise self.error(f"{name}: {fault}")
        assert isinstance(value, int)
        return value

    def error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.source}: {problem}")

    def dense(self, weights: WeightFormat) -> ModelShape:
        """Return the shape of the model with one MLP in each layer."""
        hidden_size, heads = self.read("hidden_size"), self.read("num_attention_heads")
        kv_heads = self.read("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self.error(f"num_key_value_heads: {kv_heads} does not divide {heads} heads")
        if hidden_size < heads:
            raise self.error(f"hidden_size: {hidden_size} is too small for {heads} heads")
        return ModelShape(
            hidden_size=hidden_size,
            num_layers=self.read("num_hidden_layers"),
            num_query_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=self.read("head_dim", hidden_size // heads),
            intermediate_size=self.read("intermediate_size"),
            vocab_size=self.read("vocab_size"),
            weights=weights,
            latent=None if self.config.get("kv_lora_rank") is None else self.latent(),
        )

    def latent(self) -> LatentAttention:
        return LatentAttention(
            kv_rank=self.read("kv_lora_rank"),
            rope_dim=self.read("qk_rope_head_dim"),
            nope_dim=self.read("qk_nope_head_dim"),
            value_dim=self.read("v_head_dim"),
            query_rank=self.read("q_lora_rank", 0),
        )

    def with_experts(self, dense: ModelShape) -> ModelShape:
        """Return the shape with the experts of the config, if it has any."""
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        num_experts = self.read(next((name for name in names if name in self.config), names[0]), 1)
        if num_experts == 1:
            return dense
        experts_per_token = self.read("num_experts_per_tok", 1)
        if experts_per_token > num_experts:
            raise self.error(
                f"num_experts_per_tok: {experts_per_token} is more than the {num_experts} experts"
            )
        expert_size = self.read("moe_intermediate_size", dense.intermediate_size)
        num_shared_experts = self.read("n_shared_experts", 0, NOT_NEGATIVE)
        shared_size = self.read("shared_expert_intermediate_size", 0, NOT_NEGATIVE)
        num_dense_layers = self.read("first_k_dense_replace", 0, NOT_NEGATIVE)
        return replace(
            dense,
            intermediate_size=expert_size,
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            shared_intermediate_size=shared_size or num_shared_experts * expert_size,
            num_dense_layers=num_dense_layers,
            dense_intermediate_size=dense.intermediate_size if num_dense_layers else 0,
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
