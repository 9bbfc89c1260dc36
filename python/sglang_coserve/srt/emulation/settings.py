"""What is emulated: a model on devices, and how far their times are from a latency model's."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sglang_coserve.core.latency_model.machine import Hardware, find_hardware
from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.latency_model.model_shape import find_model
from sglang_coserve.core.latency_model.operators import kv_bytes_per_token, kv_capacity_tokens
from sglang_coserve.core.latency_model.roofline import RooflineModel
from sglang_coserve.errors import ConfigError
from sglang_coserve.json_documents import read_json
from sglang_coserve.latency_profile import LatencyProfile

PLACES: Final = 4093
"""Positions that the model tells apart; a prime, so that no period of a text goes with it."""

_PCIE_4_BYTES_PER_S: Final = 25e9
_PCIE_5_BYTES_PER_S: Final = 50e9
"""What copies attain of the 32 and 64 GB/s of 16 lanes, about."""

_LARGE_MEMORY_BYTES: Final = 160 * 2**30
"""From so much memory on, SGLang computes prompts in larger chunks."""

_SMALL_MEMORY_BYTES: Final = 60e9
"""Below so much, in smaller ones; an Ascend 910C's 64 GB are not small to it."""


@dataclass(frozen=True, slots=True)
class SlowSpells:
    """Times at which a device is slow: another tenant, a clock that was lowered."""

    every_s: float
    """Mean time between the end of one and the beginning of the next."""

    last_s: float
    factor: float
    """By which steps then take longer."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: one is out of range.
        """
        are_finite = all(map(math.isfinite, (self.every_s, self.last_s, self.factor)))
        if not are_finite or self.every_s <= 0 or self.last_s <= 0 or self.factor < 1:
            raise ConfigError(
                f"slow spells every {self.every_s} s, for {self.last_s} s, {self.factor} times "
                "slower: use positive times, and a factor of at least 1"
            )

    @classmethod
    def parse(cls, text: str) -> SlowSpells:
        """Read ``EVERY_S:LAST_S:FACTOR``, such as ``60:2:3``.

        Raises:
            ConfigError: it is not that.
        """
        try:
            every_s, last_s, factor = map(float, text.split(":"))
        except ValueError:
            raise ConfigError(
                f"slow spells: {text!r} is not EVERY_S:LAST_S:FACTOR, such as 60:2:3"
            ) from None
        return cls(every_s, last_s, factor)


@dataclass(frozen=True, slots=True)
class Emulation:
    """An emulated engine; what the config.json of its model directory says of it."""

    model: str
    """One of ``MODELS``."""

    hardware: str
    """One of ``HARDWARE``."""

    profile: dict[str, Any]
    """The latency profile by which steps take time, as in a profile's file."""

    tp_size: int = 1
    """Devices that compute together; SGLang itself runs one rank."""

    noise: float = 0.03
    """Coefficient of variation of each step's time."""

    slow_spells: SlowSpells | None = None
    model_error: float = 0.0
    """Coefficient of variation of a factor that batches of about the same sizes share: what a
    latency model cannot know, and meets again and again."""

    prefill_launch_s: float = 0.0
    """What the host takes to launch a pass with prefills, which it begins when the pass before has
    ended, as FlashInfer reads lengths from the device. 0: nothing, and at any time."""

    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: one is unknown or out of range, or the model does not fit the devices.
            InputFileError: the profile is not one.
        """
        for name in ("noise", "model_error"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be from 0 to below 1, got {getattr(self, name)}")
        if not 0 <= self.prefill_launch_s < math.inf:
            raise ConfigError(f"prefill_launch_s must be at least 0, got {self.prefill_launch_s}")
        self.latency_model()
        assert self.kv_tokens

    @classmethod
    def of(
        cls,
        model: str,
        hardware: str,
        *,
        tp_size: int = 1,
        latency: LatencyProfile | None = None,
        **others: Any,
    ) -> Emulation:
        """Return an emulation by names, in any letter case.

        ``latency`` is by which steps take time; None: the roofline model of the datasheet.

        Raises:
            ConfigError: as above.
        """
        model, device = model.lower(), find_hardware(hardware)
        if latency is None:
            roofline = RooflineModel.from_datasheet(find_model(model), device, tp_size=tp_size)
            latency = LatencyProfile(roofline, None, device.name, model, tp_size, "")
        return cls(model, device.name, json.loads(latency.to_json()), tp_size=tp_size, **others)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str) -> Emulation:
        """Read the fields as a config.json has them.

        Raises:
            InputFileError: it is malformed; ``source`` names the file.
            ConfigError: as above.
        """
        return read_json(cls, json.dumps(values), source)

    def latency_model(self) -> LatencyModel:
        """Return the model by which steps take time.

        Raises:
            InputFileError: the profile is malformed.
        """
        return LatencyProfile.from_json(json.dumps(self.profile), "the profile").latency_model

    @property
    def name(self) -> str:
        """What requests call the model; it says what it is."""
        devices = self.hardware if self.tp_size == 1 else f"{self.tp_size}x{self.hardware}"
        return f"emulated-{self.model}-{devices}"

    @property
    def num_layers(self) -> int:
        """Decoder layers of the emulated model."""
        return find_model(self.model).num_layers

    @property
    def kv_tokens(self) -> int:
        """KV that fits the devices beside the weights, in tokens."""
        return kv_capacity_tokens(find_model(self.model), self._device, tp_size=self.tp_size)

    @property
    def chunk_tokens(self) -> int:
        """SGLang's own choice of ``--chunked-prefill-size`` for so much memory."""
        memory_bytes = self._device.memory_bytes
        if memory_bytes >= _LARGE_MEMORY_BYTES:
            return 16384
        return 4096 if memory_bytes < _SMALL_MEMORY_BYTES else 8192

    @property
    def copy_s_per_token(self) -> float:
        """Seconds to copy a token's KV to the host's memory; each device copies its part."""
        is_older = self._device.name in ("a40", "a100")
        bytes_per_s = _PCIE_4_BYTES_PER_S if is_older else _PCIE_5_BYTES_PER_S
        return kv_bytes_per_token(find_model(self.model), self.tp_size) / bytes_per_s

    @property
    def _device(self) -> Hardware:
        return find_hardware(self.hardware)
