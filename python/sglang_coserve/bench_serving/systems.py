"""The systems that are compared: a server, its flags, and how each load is marked."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sglang_coserve.errors import ConfigError
from sglang_coserve.metrics import SloTargets
from sglang_coserve.srt.start_defaults import as_flags

__all__ = ["ALONE", "SYSTEMS", "System", "parse_system", "tuned_stock"]


@dataclass(frozen=True, slots=True)
class System:
    """One contender."""

    name: str
    is_ours: bool
    """Our server; else stock SGLang's."""

    flags: tuple[str, ...] = ()
    """Server flags beyond those that every system gets."""

    has_offline: bool = True
    """The offline load runs beside the online one."""

    takes_slo: bool = False
    """The server is told the targets."""

    is_searched: bool = False
    """Stands for many settings of stock SGLang, of which the best one counts: see ``stock``."""

    online_body: Mapping[str, Any] = field(default_factory=dict)
    """Added to the body of every online request."""

    offline_body: Mapping[str, Any] = field(default_factory=dict)
    """Added to the body of every offline request: its mark."""

    def server_flags(self, targets: SloTargets) -> tuple[str, ...]:
        """Return the system's own part of the server's command line."""
        given = (("--slo-ttft-ms", targets.ttft_s), ("--slo-tpot-ms", targets.tpot_s))
        words = [
            word
            for flag, target_s in given
            if self.takes_slo and target_s is not None
            for word in (flag, f"{target_s * 1e3:.3f}")
        ]
        return (*words, *self.flags)


_PRIORITIES: Final[Mapping[str, Any]] = {
    # The larger number goes first; a difference above 10 preempts running requests.
    "online_body": {"priority": 100},
    "offline_body": {"priority": 0},
}
_MARKED: Final[Mapping[str, Any]] = {"offline_body": {"service_tier": "flex"}}
ALONE: Final = "alone"
"""Latencies are divided by this system's."""

SYSTEMS: Final[Mapping[str, System]] = {
    system.name: system
    for system in (
        System(ALONE, is_ours=False, has_offline=False),
        System("stock", is_ours=False),
        System(
            "stock-priority", is_ours=False, flags=("--enable-priority-scheduling",), **_PRIORITIES
        ),
        System("stock-tuned", is_ours=False, is_searched=True, **_PRIORITIES),
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
