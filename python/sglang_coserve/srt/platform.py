"""The interface to what SGLang computes on: GPUs, a CPU, or an emulated GPU."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.errors import ConfigError
from sglang_coserve.latency_profile import LatencyProfile


class Platform:
    """A platform that serves no model. It takes the place of a deleted platform.

    The methods that start a server are in the order of their calls.
    """

    on_cpu: ClassVar[bool] = False
    """True if torch computes on the CPU."""

    flags: Mapping[str, Any] = MappingProxyType({})
    """Defaults of fields of ``ServerArgs``, where they are not SGLang's own."""

    emulated: str | None = None
    """Name of the emulated device; None if nothing is emulated."""

    latency_model: LatencyModel | None = None
    """Model of the times of emulated steps; None if nothing is emulated."""

    @classmethod
    def serving(cls, model: Path | None) -> Self | None:
        """Return the platform that serves a model directory, or a model that is not known yet.

        None: another platform serves it.

        Raises:
            InputFileError: the model is emulated, and its config.json does not say how.
            ConfigError: what its config.json says is out of range.
        """
        return None

    def set_environment_defaults(self) -> None:
        """Set the variables that SGLang reads when it is first imported."""

    @property
    def warning(self) -> str | None:
        """The sentence that the log must say of the model; None: no sentence."""
        if self.emulated is None:
            return None
        return f"EMULATED: no GPU computes here, and figures are not of one: {self.emulated}"

    def cores_for(self, server_args: Any) -> AbstractContextManager[None]:
        """Return the context in which to start the ranks."""
        return nullcontext()

    def install_replacements(self) -> None:
        """Replace the parts of SGLang in this process that do not work on the platform.

        To be called in each process that runs a scheduler, before the scheduler is created.
        """

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
        """Return the platform on which a model takes the time of some hardware.

        Args:
            model: name of a known model.
            hardware: name of a known device.
            tp_size: devices that compute together.
            latency: the profile by which steps take time; None: the datasheet's.
            slow_spells: ``EVERY_S:LAST_S:FACTOR``.
            variation: further fields of an emulation (docs/emulation.md).

        Raises:
            ConfigError: a value is unknown or out of range, or nothing is emulated here.
        """
        raise ConfigError("--emulate: this installation has no emulated GPU; leave it out")

    def make_model(self, directory: Path, *, vocab: int, context: int | None = None) -> str:
        """Write a model that this platform serves; return stock SGLang's command to serve it.

        Args:
            directory: where the model goes.
            vocab: most tokens in its vocabulary.
            context: its longest prompt plus output, tokens; None: the usual one.

        Raises:
            ConfigError: ``directory`` holds another model, or no model can be like that.
            MissingExtraError: torch or transformers is not installed.
        """
        raise NotImplementedError


class Gpu(Platform):
    """GPUs, on which SGLang starts as it is."""

    @classmethod
    def serving(cls, model: Path | None) -> Self:
        """Return the platform, which serves every model."""
        return cls()
