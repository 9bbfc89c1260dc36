"""An emulated GPU as a platform of SGLang: the CPU, whose steps take a GPU's time."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from sglang_coserve.latency_profile import LatencyProfile
from sglang_coserve.srt.cpu.platform import Cpu
from sglang_coserve.srt.emulation import model_directory
from sglang_coserve.srt.emulation.settings import Emulation, SlowSpells


class EmulatedGpu(Cpu):
    """The platform of a model directory that ``make_model`` has written."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self.flags = model_directory.flag_defaults(emulation)
        self.emulated = emulation.name
        self.latency_model = emulation.latency_model()

    @classmethod
    def serving(cls, model: Path | None) -> Self | None:
        """Return the platform; None for a model that is not emulated.

        Raises:
            InputFileError, ConfigError: see ``Platform.serving``.
        """
        emulation = None if model is None else model_directory.read_emulation(model)
        return None if emulation is None else cls(emulation)

    @classmethod
    def imitating(
        cls,
        model: str,
        hardware: str,
        *,
        tp_size: int = 1,
        latency: LatencyProfile | None = None,
        slow_spells: str | None = None,
        **variation: Any,
    ) -> Self:
        """See ``Platform.imitating``."""
        spells = None if slow_spells is None else SlowSpells.parse(slow_spells)
        return cls(
            Emulation.of(
                *(model, hardware),
                tp_size=tp_size,
                latency=latency,
                slow_spells=spells,
                **variation,
            )
        )

    def set_environment_defaults(self) -> None:
        """See ``model_directory.set_environment_defaults``."""
        model_directory.set_environment_defaults()

    def make_model(self, directory: Path, *, vocab: int, context: int | None = None) -> str:
        """See ``Platform.make_model``."""
        context = model_directory.CONTEXT_TOKENS if context is None else context
        made = model_directory.make_emulated_model(
            directory, self._emulation, vocab=vocab, context=context
        )
        return model_directory.stock_command(made)
