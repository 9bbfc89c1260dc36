"""What was measured on: the part of a profile that is not numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from sglang_coserve.core.latency_model import HARDWARE, Hardware

__all__ = ["Machine"]

# Where the fit of a roofline starts on a device without a datasheet here.
_ANY_CPU: Final = Hardware(
    name="cpu",
    bf16_flop_per_s=1e11,
    memory_byte_per_s=2e10,
    link_byte_per_s=1e10,
    memory_bytes=16e9,
    source="assumed for any CPU; only the start of a fit",
)


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on a device, as far as iteration times depend on them."""

    hardware: str
    """A GPU's name, or a CPU's with its cores and the threads used."""

    model: str
    """Path or name, as SGLang was given it."""

    tp_size: int
    sglang_version: str
    model_config: Mapping[str, object]
    """The model's config.json."""

    settings: Mapping[str, object]
    """Flags of SGLang that iteration times depend on."""

    captured_batch_sizes: tuple[int, ...]
    """Of the decode CUDA graphs, ascending; empty without any."""

    @property
    def datasheet(self) -> Hardware:
        """The device's peaks if they are known, else an assumption to start a fit from."""
        name = self.hardware.lower()
        for known in HARDWARE.values():
            if known.name in name:
                return known
        if "cpu" in name:
            return replace(_ANY_CPU, name=self.hardware)
        assumed = "an A100's peaks, assumed for an unknown GPU; only the start of a fit"
        return replace(HARDWARE["a100"], name=self.hardware, source=assumed)
