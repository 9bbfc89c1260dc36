"""Machines: the peaks of devices, the dimensions of models, and what memory these leave for KV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeVar

from pydantic import PositiveFloat, PositiveInt, ValidationError

from sglang_coserve.core.validation import JsonDocument, explain
from sglang_coserve.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hardware:
    """The peak performance of one device, as stated by its vendor."""

    name: str
    bf16_flop_per_s: PositiveFloat
    """Dense BF16 matrix multiplication, without structured sparsity."""

    memory_byte_per_s: PositiveFloat
    link_byte_per_s: PositiveFloat
    """Between devices of one node, in one direction."""

    memory_bytes: PositiveFloat
    source: str
    """Where the figures were published."""


HARDWARE: Final = MappingProxyType(
    {
        hardware.name: hardware
        for hardware in (
            Hardware(
                name="a100",
                bf16_flop_per_s=312e12,
                memory_byte_per_s=2.039e12,
                # NVLink 3: 600 GB/s counts both directions.
                link_byte_per_s=300e9,
                memory_bytes=80e9,
                source="NVIDIA A100 80GB SXM datasheet",
            ),
            Hardware(
                name="h100",
                # The datasheet's 1,979 TFLOPS are with sparsity; dense is half.
                bf16_flop_per_s=989.5e12,
                memory_byte_per_s=3.35e12,
                # NVLink 4: 900 GB/s counts both directions.
                link_byte_per_s=450e9,
                memory_bytes=80e9,
                source="NVIDIA H100 SXM datasheet",
            ),
            Hardware(
                name="h200",
                bf16_flop_per_s=989.5e12,
                memory_byte_per_s=4.8e12,
                link_byte_per_s=450e9,
                memory_bytes=141e9,
                source="NVIDIA H200 SXM datasheet",
            ),
            Hardware(
                name="b200",
                # Of one GPU of eight; 18 PFLOPS, 64 TB/s and 1.44 TB are of all. Dense is half of
                # the figure with sparsity.
                bf16_flop_per_s=2.25e15,
                memory_byte_per_s=8e12,
                # NVLink 5: 1.8 TB/s counts both directions.
                link_byte_per_s=900e9,
                memory_bytes=180e9,
                source="NVIDIA DGX B200 datasheet, divided by its eight GPUs",
            ),
            # One of the two dies of a package, because OOCO §5.1.1 runs an
            # instance on one. The package has 752 TFLOPS, 3.2 TB/s, 128 GB and
            # 392 GB/s.
            Hardware(
                name="ascend-910c",
                bf16_flop_per_s=376e12,
                memory_byte_per_s=1.6e12,
                link_byte_per_s=196e9,
                memory_bytes=64e9,
                source="Zuo et al., Serving Large Language Models on Huawei CloudMatrix384, "
                "arXiv:2506.12708, hardware section, halved for one die",
            ),
        )
    }
)
"""The devices known by name."""

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
    return _named(MODELS, name, "model", ", or the path of a config.json")


def find_hardware(name: str) -> Hardware:
    """Return the device of this name, in any letter case.

    Raises:
        ConfigError: the name is not known; the message lists the known ones.
    """
    return _named(HARDWARE, name, "hardware")


def _named(known: Mapping[str, T], name: str, what: str, or_else: str = "") -> T:
    try:
        return known[name.lower()]
    except KeyError:
        names = ", ".join(known)
        raise ConfigError(f"unknown {what} {name!r}: use one of {names}{or_else}") from None


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
