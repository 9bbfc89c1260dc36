"""The start of a server: environment, defaults of flags, and checks, by machine and model."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sglang_coserve.errors import ConfigError
from sglang_coserve.srt import compat
from sglang_coserve.srt.optional_parts import KV_STORE, REQUEST_MOVES, platform_for
from sglang_coserve.srt.platform import Platform
from sglang_coserve.srt.steps.prefix_leases import EVICTION_POLICY
from sglang_coserve.web.asgi import IDLE_CONNECTION_S

_HUB_TIMEOUT_S: Final = 10.0

ANYWHERE: Final = {"radix_eviction_policy": EVICTION_POLICY}
"""Defaults of fields of ``ServerArgs`` on every platform, which may have more."""


def set_up_platform(model_path: str | None) -> Platform:
    """Set the environment that SGLang needs for a model on this machine; return the platform.

    To be called before SGLang is first imported.

    Raises:
        InputFileError: the model is emulated, and its config.json does not say how.
        ConfigError: what it says is out of range, there is nothing at the model's path, or
            Hugging Face has no model of that name.
    """
    os.environ.setdefault("SGLANG_TIMEOUT_KEEP_ALIVE", str(IDLE_CONNECTION_S))
    if model_path and not Path(model_path).exists():
        _check_name(model_path)
    platform = platform_for(Path(model_path) if model_path else None)
    platform.set_environment_defaults()
    return platform


def _check_name(model: str) -> None:
    """Refuse what is no directory, unless Hugging Face has it, or had it when it was downloaded.

    SGLang would look for it for a minute, and end with a traceback.

    Raises:
        ConfigError: see above.
    """
    mend = "name one with a config.json, or a model of Hugging Face's"
    missing = f"--model-path {model}: there is no such directory"
    if ":" in model or os.environ.get("SGLANG_USE_MODELSCOPE"):
        return  # It comes from elsewhere.
    if model.startswith(("/", "./", "../")) or model.count("/") > 1:
        raise ConfigError(f"{missing}; {mend}")
    import httpx  # The client of huggingface_hub.
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    kept = Path(constants.HF_HUB_CACHE, "models--" + model.replace("/", "--"), "snapshots")
    if any(kept.glob("*/config.json")):
        return
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"{missing}, nor is it in {constants.HF_HUB_CACHE} (HF_HUB_OFFLINE is set); {mend}"
        )
    try:
        HfApi().model_info(model, timeout=_HUB_TIMEOUT_S)
    except GatedRepoError:
        return
    except (RepositoryNotFoundError, ValueError) as error:
        raise ConfigError(
            f"{missing}, and {constants.ENDPOINT} shows no such model; {mend} (with HF_TOKEN, if "
            "it is private)"
        ) from error
    except HfHubHTTPError:
        return
    except (OSError, httpx.HTTPError) as error:
        raise ConfigError(
            f"{missing}, nor is it in {constants.HF_HUB_CACHE}, and {constants.ENDPOINT} cannot "
            f"be reached ({error}); {mend}"
        ) from error


def check_settings(server_args: Any, *, on_cpu: bool) -> Any:
    """Refuse what cannot be co-served, with our settings attached; return SGLang's in effect.

    Raises:
        UnsupportedError: a setting, or the model, cannot be co-served.
        StartupError: the directory of moved KV cannot be used.
    """
    config, args = server_args._coserve, compat.settings_of(server_args)
    compat.check_server_args(args, config)
    compat.check_window_cache(server_args)
    KV_STORE.check(server_args, config, on_cpu=on_cpu)
    REQUEST_MOVES.check(config)
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
