"""Language models known by name, and the memory left for KV on a device."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from sglang_coserve.core.latency_model.hardware import Hardware
from sglang_coserve.core.latency_model.model_shape import ModelShape
from sglang_coserve.errors import ConfigError

__all__ = ["MODELS", "find_model", "kv_bytes_per_token", "kv_capacity_tokens", "weight_bytes"]

_VALUE_BYTES: Final = 2

_USABLE_SHARE: Final = 0.9
"""Share of the device memory for weights and KV; about SGLang's default."""

# hidden_size, num_layers, num_query_heads, num_kv_heads, head_dim, intermediate_size,
# vocab_size, and the numbers of experts and of those of a token, as the config.json published with
# each model states them.
MODELS: Final = MappingProxyType(
    {
        "llama-2-7b": ModelShape(4096, 32, 32, 32, 128, 11008, 32000),
        "llama-3.1-8b": ModelShape(4096, 32, 32, 8, 128, 14336, 128256),
        "llama-3.1-70b": ModelShape(8192, 80, 64, 8, 128, 28672, 128256),
        "mixtral-8x7b": ModelShape(4096, 32, 32, 8, 128, 14336, 32000, 8, 2),
        "qwen2.5-7b": ModelShape(3584, 28, 28, 4, 128, 18944, 152064),
        "qwen2.5-14b": ModelShape(5120, 48, 40, 8, 128, 13824, 152064),
        "qwen2.5-32b": ModelShape(5120, 64, 40, 8, 128, 27648, 152064),
        "qwen2.5-72b": ModelShape(8192, 80, 64, 8, 128, 29568, 152064),
    }
)
"""The models known by name; values take 16 bits and no embedding is tied."""


def find_model(name: str) -> ModelShape:
    """Return the model of this name, in any letter case.

    Raises:
        ConfigError: the name is not known; the message lists the known ones.
    """
    try:
        return MODELS[name.lower()]
    except KeyError:
        known = ", ".join(MODELS)
        raise ConfigError(
            f"unknown model {name!r}: use one of {known}, or the path of a config.json"
        ) from None


def weight_bytes(shape: ModelShape) -> int:
    """Return the size of all weights."""
    hidden = shape.hidden_size
    query_width = shape.num_query_heads * shape.head_dim
    kv_width = shape.num_kv_heads * shape.head_dim
    attention = hidden * (2 * query_width + 2 * kv_width)
    mlp = 3 * hidden * shape.intermediate_size * shape.num_experts
    embeddings = 2 * shape.vocab_size * hidden
    return _VALUE_BYTES * (embeddings + shape.num_layers * (attention + mlp))


def kv_bytes_per_token(shape: ModelShape) -> int:
    """Return the size of one token's keys and values over all layers."""
    return 2 * _VALUE_BYTES * shape.num_layers * shape.num_kv_heads * shape.head_dim


def kv_capacity_tokens(shape: ModelShape, hardware: Hardware, *, tp_size: int = 1) -> int:
    """Return the KV capacity in tokens.

    Raises:
        ConfigError: the weights leave no room.
    """
    usable_bytes = _USABLE_SHARE * hardware.memory_bytes * tp_size
    room_bytes = usable_bytes - weight_bytes(shape)
    tokens = int(room_bytes / kv_bytes_per_token(shape))
    if tokens < 1:
        raise ConfigError(
            f"{weight_bytes(shape) / 1e9:.0f} GB of weights do not fit the "
            f"{usable_bytes / 1e9:.0f} GB usable on {tp_size} x {hardware.name}: "
            "use more devices (--tp-size) or a smaller model"
        )
    return tokens
