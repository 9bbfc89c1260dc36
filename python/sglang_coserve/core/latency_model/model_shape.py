"""The dimensions of a transformer, read from its config.json if it is dense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import PositiveInt, ValidationError

from sglang_coserve.core.validation import JsonDocument, explain
from sglang_coserve.errors import ConfigError

__all__ = ["ModelShape"]

_SUPPORTED: Final = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ADVICE: Final = "measure a profile of another kind on this model instead"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of identical layers: grouped-query attention, and a gated MLP or experts.

    Llama 2 and 3, Qwen2, Qwen2.5 and Qwen3 (dense) have this shape, and Mixtral. Values take
    16 bits.
    """

    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_query_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    intermediate_size: PositiveInt
    vocab_size: PositiveInt
    num_experts: PositiveInt = 1
    """MLPs of a layer, each of ``intermediate_size``; their router is not counted."""

    experts_per_token: PositiveInt = 1

    @classmethod
    def from_config(
        cls, config: Mapping[str, object], source: str = "the model's config.json"
    ) -> ModelShape:
        """Read a Hugging Face config.

        Raises:
            ConfigError: the architecture is not supported (mixture of experts,
                latent or sliding-window attention, quantized weights, another
                family), or a dimension is missing or malformed.
        """
        architectures = config.get("architectures")
        if not isinstance(architectures, list) or not set(architectures) & set(_SUPPORTED):
            raise ConfigError(
                f"{source}: architectures: {architectures} is not one of "
                f"{', '.join(_SUPPORTED)}: {_ADVICE}"
            )
        if config.get("quantization_config") is not None:
            raise ConfigError(
                f"{source}: quantization_config: quantized weights are not modelled: {_ADVICE}"
            )
        if config.get("use_sliding_window"):
            raise ConfigError(
                f"{source}: use_sliding_window: window attention is not modelled: {_ADVICE}"
            )
        try:
            dimensions = _Dimensions.model_validate(config)
        except ValidationError as error:
            raise ConfigError(f"{source}: {explain(error)}") from error
        heads = dimensions.num_attention_heads
        kv_heads = dimensions.num_key_value_heads or heads
        if heads % kv_heads:
            raise ConfigError(
                f"{source}: num_key_value_heads: {kv_heads} does not divide {heads} heads"
            )
        if dimensions.hidden_size < heads:
            raise ConfigError(
                f"{source}: hidden_size: {dimensions.hidden_size} is too small for {heads} heads"
            )
        return cls(
            hidden_size=dimensions.hidden_size,
            num_layers=dimensions.num_hidden_layers,
            num_query_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dimensions.head_dim or dimensions.hidden_size // heads,
            intermediate_size=dimensions.intermediate_size,
            vocab_size=dimensions.vocab_size,
        )


class _Dimensions(JsonDocument):
    """The dimensions in a Hugging Face config, under its names."""

    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    intermediate_size: PositiveInt
    vocab_size: PositiveInt
