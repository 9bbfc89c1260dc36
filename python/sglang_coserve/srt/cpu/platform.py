"""A machine without CUDA as a platform of SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Self

from sglang_coserve.srt.cpu import defaults
from sglang_coserve.srt.platform import Platform


class Cpu(Platform):
    """A machine on which torch sees no CUDA device."""

    on_cpu: ClassVar[bool] = True
    flags: Mapping[str, Any] = defaults.FLAG_DEFAULTS

    @classmethod
    def serving(cls, model: Path | None) -> Self | None:  # noqa: ARG003
        """Return the platform; None where torch sees a CUDA device."""
        return None if defaults.has_cuda() else cls()

    def set_environment_defaults(self) -> None:
        """See ``defaults.set_environment_defaults``."""
        defaults.set_environment_defaults()

    def cores_for(self, server_args: Any) -> AbstractContextManager[None]:
        """See ``defaults.cores_for``."""
        return defaults.cores_for(server_args)

    def install_replacements(self) -> None:
        """See ``replacements.install_replacements``."""
        from sglang_coserve.srt.cpu.replacements import install_replacements

        install_replacements()
