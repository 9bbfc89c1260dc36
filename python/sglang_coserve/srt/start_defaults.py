"""What a server starts with, by its machine and its model: environment, and defaults of flags."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sglang_coserve.errors import ConfigError
from sglang_coserve.srt import compat
from sglang_coserve.srt.cpu import defaults as cpu
from sglang_coserve.srt.kv_checkpoint.settings import check_in_place, check_model, check_move_dir

_EMULATED: Final = ["EmulatedForCausalLM"]


@dataclass(frozen=True, slots=True)
class StartDefaults:
    """See ``start_defaults``."""

    on_cpu: bool
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of fields of ``ServerArgs``, where they are not SGLang's own."""

    emulated: str | None = None
    """What is emulated; None: nothing is."""

    @property
    def warning(self) -> str | None:
        """What the log must say of the model; None: nothing."""
        if self.emulated is None:
            return None
        return f"EMULATED: no GPU computes here, and figures are not of one: {self.emulated}"


def start_defaults(model_path: str | None) -> StartDefaults:
    """Set the environment that SGLang needs for a model on this machine; return the defaults.

    To be called before SGLang is first imported.

    Raises:
        InputFileError: the model is emulated, and its config.json does not say how.
        ConfigError: what it says is out of range, or there is nothing at the model's path.
    """
    # Anything else may be the name of a model that SGLang downloads.
    paths = ("/", "./", "../")
    if model_path and model_path.startswith(paths) and not Path(model_path).exists():
        raise ConfigError(
            f"--model-path {model_path}: there is no such directory; name one with a config.json,"
            " or a model of Hugging Face's"
        )
    if model_path is not None and is_emulated(Path(model_path)):
        # Only then is any of it imported.
        from sglang_coserve.srt.emulation import model_directory

        emulation = model_directory.read_emulation(Path(model_path))
        assert emulation is not None
        model_directory.set_environment_defaults()
        return StartDefaults(True, model_directory.flag_defaults(emulation), emulation.name)
    if cpu.has_cuda():
        return StartDefaults(on_cpu=False)
    cpu.set_environment_defaults()
    return StartDefaults(True, cpu.FLAG_DEFAULTS)


def check_settings(server_args: Any, *, on_cpu: bool) -> Any:
    """Refuse what cannot be co-served, with our settings attached; return SGLang's in effect.

    Raises:
        UnsupportedError: a setting, or the model, cannot be co-served.
        StartupError: the directory of moved KV cannot be used.
    """
    config, args = server_args._coserve, compat.settings_of(server_args)
    compat.check_server_args(args, config)
    check_in_place(server_args, config)
    compat.check_window_cache(server_args, config.offline_policy)
    check_model(server_args, config, on_cpu=on_cpu)
    check_move_dir(config)
    return args


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Return fields of ``ServerArgs`` as words of a command line."""
    words: list[str] = []
    for name, value in settings.items():
        if value is not False:  # A switch that is off.
            words.append(f"--{name.replace('_', '-')}")
            words += [] if value is True else [str(value)]
    return words


def model_path_in(argv: Sequence[str]) -> str | None:
    """Return the model of a command line; None if it names none."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", "--model", nargs="?")
    model_path: str | None = parser.parse_known_args(list(argv))[0].model_path
    return model_path


def is_emulated(directory: Path) -> bool:
    """Tell whether a directory holds a model that is emulated."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # SGLang says what is wrong with it, or downloads it.
    return isinstance(config, dict) and config.get("architectures") == _EMULATED
