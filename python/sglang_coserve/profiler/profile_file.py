"""Profile files, and the machine, model and settings that they name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from sglang_coserve.core.latency_model.machine import HARDWARE, Hardware
from sglang_coserve.core.latency_model.model_shape import ModelShape, find_model
from sglang_coserve.core.latency_model.profile import LatencyProfile
from sglang_coserve.core.latency_model.roofline import RooflineModel
from sglang_coserve.durable_files import replace as replace_file
from sglang_coserve.errors import InputFileError, unreadable

# Start values for fitting a roofline on a device without a known datasheet.
_ANY_CPU: Final = Hardware(
    name="cpu",
    bf16_flop_per_s=1e11,
    memory_byte_per_s=2e10,
    link_byte_per_s=1e10,
    memory_bytes=16e9,
    source="assumed for any CPU; only the start of a fit",
)


@dataclass(frozen=True, slots=True)
class ProfiledMachine:
    """A model on a device, with everything that step times depend on."""

    hardware: str
    """Name of the GPU, or of the CPU with its cores and the threads used; of an emulated GPU it
    says so."""

    model: str
    """Path or name of the model, as given to SGLang."""

    tp_size: int
    sglang_version: str
    model_config: Mapping[str, object]
    """The model's config.json."""

    settings: Mapping[str, object]
    """Flags of SGLang that step times depend on."""

    captured_batch_sizes: tuple[int, ...]
    """Batch sizes of the decode CUDA graphs, ascending; empty without graphs."""

    @property
    def datasheet(self) -> Hardware:
        """The device's peak performance; if unknown, assumed values to start a fit from."""
        name = self.hardware.lower()
        for known in HARDWARE.values():
            if known.name in name:
                return known
        if "cpu" in name:
            return replace(_ANY_CPU, name=self.hardware)
        assumed = "an A100's peaks, assumed for an unknown GPU; only the start of a fit"
        return replace(HARDWARE["a100"], name=self.hardware, source=assumed)

    def roofline(self) -> RooflineModel:
        """Return the latency model of the datasheet; of an emulated model, that of the real one.

        Raises:
            ConfigError: the model's config.json has not what it needs.
        """
        emulated = self.model_config.get("emulation")
        if isinstance(emulated, Mapping):
            shape, tp_size = find_model(emulated["model"]), emulated["tp_size"]
        else:
            shape, tp_size = ModelShape.from_config(self.model_config), self.tp_size
        return RooflineModel.from_datasheet(shape, self.datasheet, tp_size=tp_size)


def load_profile(path: Path) -> LatencyProfile:
    """Read a profile that ``coserve profile`` wrote.

    Raises:
        InputFileError: the file cannot be read, or is not a profile.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputFileError(
            f"{unreadable(path, error)}: make a latency profile with coserve profile "
            "--model-path … -o FILE"
        ) from error
    return LatencyProfile.from_json(text, str(path))


def write_profile(profile: LatencyProfile, path: Path) -> None:
    """Write a profile: a reader sees the old file or the new one, also after a power failure."""
    replace_file(path, lambda file: file.write(profile.to_json().encode()), 0o666)
