"""The dimensions of a dense transformer, read from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from sglang_coserve.core.latency_model.json_object import JsonObject
from sglang_coserve.errors import ConfigError

__all__ = ["ModelShape"]

_SUPPORTED: Final = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ADVICE: Final = "measure a profile of another kind on this model instead"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of identical layers: grouped-query attention and a gated dense MLP.

    Llama 2 and 3, Qwen2, Qwen2.5 and Qwen3 (dense) have this shape. Values take
    16 bits.
    """

    hidden_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int

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
        fields = JsonObject(config, source, error=ConfigError)
        architectures = config.get("architectures")
        if not isinstance(architectures, list) or not set(architectures) & set(_SUPPORTED):
            fields.fail(
                "architectures", f"{architectures} is not one of {', '.join(_SUPPORTED)}: {_ADVICE}"
            )
        if fields.has("quantization_config"):
            fields.fail("quantization_config", f"quantized weights are not modelled: {_ADVICE}")
        if config.get("use_sliding_window"):
            fields.fail("use_sliding_window", f"window attention is not modelled: {_ADVICE}")
        hidden_size = fields.integer("hidden_size", minimum=1)
        heads = fields.integer("num_attention_heads", minimum=1)

        def optional(name: str, default: int) -> int:
            return fields.integer(name, minimum=1) if fields.has(name) else default

        kv_heads = optional("num_key_value_heads", heads)
        if heads % kv_heads:
            fields.fail("num_key_value_heads", f"{kv_heads} does not divide {heads} heads")
        if hidden_size < heads:
            fields.fail("hidden_size", f"{hidden_size} is too small for {heads} heads")
        return cls(
            hidden_size=hidden_size,
            num_layers=fields.integer("num_hidden_layers", minimum=1),
            num_query_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=optional("head_dim", hidden_size // heads),
            intermediate_size=fields.integer("intermediate_size", minimum=1),
            vocab_size=fields.integer("vocab_size", minimum=1),
        )

    def to_json(self) -> dict[str, object]:
        """Return the dimensions, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, dimensions: JsonObject) -> ModelShape:
        """Return what ``to_json`` gave.

        Raises:
            InputFileError: a dimension is missing or malformed.
        """
        return cls(
            hidden_size=dimensions.integer("hidden_size", minimum=1),
            num_layers=dimensions.integer("num_layers", minimum=1),
            num_query_heads=dimensions.integer("num_query_heads", minimum=1),
            num_kv_heads=dimensions.integer("num_kv_heads", minimum=1),
            head_dim=dimensions.integer("head_dim", minimum=1),
            intermediate_size=dimensions.integer("intermediate_size", minimum=1),
            vocab_size=dimensions.integer("vocab_size", minimum=1),
        )
