"""Devices: their peaks, as their vendors state them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Final, TypeVar

from sglang_coserve.core.ranges import POSITIVE, check_ranges
from sglang_coserve.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hardware:
    """The peak performance of one device, as stated by its vendor.

    Raises:
        ConfigError: on construction, when a figure is not positive; the message names it.
    """

    name: str
    bf16_flop_per_s: Annotated[float, POSITIVE]
    """Dense BF16 matrix multiplication, without structured sparsity."""

    memory_byte_per_s: Annotated[float, POSITIVE]
    link_byte_per_s: Annotated[float, POSITIVE]
    """Between devices of one node, in one direction."""

    memory_bytes: Annotated[float, POSITIVE]
    source: str
    """Where the figures were published."""

    def __post_init__(self) -> None:
        check_ranges(self, f"hardware {self.name}: {{}}".format)


HARDWARE: Final = MappingProxyType(
    {
        hardware.name: hardware
        for hardware in (
            Hardware(
                name="a40",
                bf16_flop_per_s=149.7e12,
                memory_byte_per_s=696e9,
                # The NVLink bridge of two: 112.5 GB/s counts both directions.
                link_byte_per_s=56.25e9,
                memory_bytes=48e9,
                source="NVIDIA A40 datasheet",
            ),
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


def find_hardware(name: str) -> Hardware:
    """Return the device of this name, in any letter case.

    Raises:
        ConfigError: the name is not known; the message lists the known ones.
    """
    return named(HARDWARE, name, "hardware")


def named(known: Mapping[str, T], name: str, what: str, or_else: str = "") -> T:
    """Return what is known under ``name``, in any letter case, or raise a ``ConfigError``."""
    try:
        return known[name.lower()]
    except KeyError:
        names = ", ".join(known)
        raise ConfigError(f"unknown {what} {name!r}: use one of {names}{or_else}") from None
