"""Obtains a server's latency model: from a profile, a short profiling run, or a datasheet."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from sglang_coserve.config import CoserveConfig
from sglang_coserve.errors import ConfigError, CoserveError, InputFileError
from sglang_coserve.latency_profile import LatencyProfile
from sglang_coserve.profiler.fits import ProfiledMachine, choose, fit_all, load_profile, to_profile
from sglang_coserve.srt.profiling.executor import machine_of, profile_quickly

logger = logging.getLogger(__name__)


def check_profile(config: CoserveConfig, tp_size: int) -> None:
    """Find out before the model is loaded whether the profile named in ``config`` can be used.

    Raises:
        InputFileError: it cannot be read.
        ConfigError: it was measured with another tensor-parallel size.
    """
    if config.latency_profile is not None:
        _read(Path(config.latency_profile), tp_size)


def latency_profile(scheduler: Any, config: CoserveConfig) -> LatencyProfile:
    """Return the profile to start from; every rank must call it before the event loop starts.

    Raises:
        InputFileError: the profile named in ``config`` cannot be read.
        ConfigError: it was measured with another tensor-parallel size, or there is no profile
            and no datasheet model for this hardware and model.
    """
    machine = machine_of(scheduler)
    if config.latency_profile is not None:
        return _load(Path(config.latency_profile), machine)
    if config.startup_profile_seconds > 0 and scheduler.is_generation:
        profile = _measure(scheduler, machine, config.startup_profile_seconds)
        if profile is not None:
            return profile
    return _guess(machine)


def _read(path: Path, tp_size: int) -> LatencyProfile:
    profile = load_profile(path)
    if profile.tp_size != tp_size:
        raise ConfigError(
            f"{path}: measured with a tensor-parallel size of {profile.tp_size}, the server has "
            f"{tp_size}: profile again with --tp-size {tp_size}"
        )
    return profile


def _load(path: Path, machine: ProfiledMachine) -> LatencyProfile:
    profile = _read(path, machine.tp_size)
    for what, profiled, here in (
        ("hardware", profile.hardware, machine.hardware),
        ("model", profile.model, machine.model),
        ("SGLang version", profile.sglang_version, machine.sglang_version),
        (
            "attention backend",
            profile.attention_backend or machine.attention_backend,
            machine.attention_backend,
        ),
    ):
        if profiled != here:
            logger.warning(
                "%s: the profile's %s is %s, the server's is %s: predictions will be off until "
                "they are refined; profile again with coserve profile",
                path, what, profiled, here,
            )  # fmt: skip
    return profile


def _measure(
    scheduler: Any, machine: ProfiledMachine, time_limit_s: float
) -> LatencyProfile | None:
    """Profile for at most this time; return None, with a warning, if that is not possible."""
    try:
        samples = profile_quickly(scheduler, time_limit_s)
        fit = choose(fit_all(samples, machine))
    except InputFileError as error:
        logger.warning("no profile at start-up: %s", error)
        return None
    logger.info("latency profile from %d batches: %s, %s", len(samples), fit.model.kind, fit.report)
    return to_profile(fit, machine)


def _guess(machine: ProfiledMachine) -> LatencyProfile:
    try:
        model = machine.roofline()
    except CoserveError as error:
        raise ConfigError(
            f"no latency model for {machine.model}: {error}; give a --latency-profile, or more "
            "--startup-profile-seconds"
        ) from error
    logger.info("latency model: from the %s, refined while serving", machine.datasheet.source)
    return LatencyProfile(
        model,
        None,
        machine.hardware,
        machine.model,
        machine.tp_size,
        machine.sglang_version,
        machine.attention_backend,
    )
