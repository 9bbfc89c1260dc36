"""The systems that are compared: a server, its flags, and how each load is marked."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from sglang_coserve.demo.servers import PRIORITIES, System
from sglang_coserve.errors import ConfigError
from sglang_coserve.srt.start_defaults import as_flags

__all__ = ["ALONE", "SYSTEMS", "parse_system", "tuned_stock"]


_MARKED: Final[Mapping[str, Any]] = {"offline_body": {"service_tier": "flex"}}
ALONE: Final = "alone"
"""Latencies are divided by this system's."""

SYSTEMS: Final[Mapping[str, System]] = {
    system.name: system
    for system in (
        System(ALONE, is_ours=False, has_offline=False),
        System("stock", is_ours=False),
        System(
            "stock-priority", is_ours=False, flags=("--enable-priority-scheduling",), **PRIORITIES
        ),
        System("stock-tuned", is_ours=False, is_searched=True, **PRIORITIES),
        System("coserve", is_ours=True, **_MARKED),
        System("coserve-slo", is_ours=True, takes_slo=True, **_MARKED),
    )
}
"""By name; a new contender is a new entry."""


def parse_system(text: str) -> System:
    """Return the system that ``NAME [FLAGS…]`` describes: a known one, with more server flags.

    Raises:
        ConfigError: the name is unknown.
    """
    name, *flags = shlex.split(text) or [""]
    if name not in SYSTEMS:
        raise ConfigError(f"--systems {name!r}: known are {', '.join(SYSTEMS)}")
    return replace(SYSTEMS[name], name=text, flags=(*SYSTEMS[name].flags, *flags))


def tuned_stock(searched: System, settings: Mapping[str, Any]) -> System:
    """Return the system with ``settings``, fields of ``ServerArgs``, in place of a search."""
    words = as_flags(settings)
    flags: Sequence[str] = (*words, *searched.flags)
    return replace(
        searched, name=" ".join((searched.name, *words)), flags=tuple(flags), is_searched=False
    )
