"""The objective: what online requests are promised beside offline work."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sglang_coserve.core.control.slo import Latency, Slo, Statistic
from sglang_coserve.errors import ConfigError

POLICY_WITH_DEFAULTS: Final = "coserve"
"""The policy that keeps the default objective; the others keep only the targets they are given."""

ONLINE_SLOWDOWN: Final = 0.1
"""Default slowdown of first tokens, as a fraction of the P99 TTFT alone."""

STREAM_SLOWDOWN: Final = 1.0
"""Default slowdown of streams, as a fraction of the time of a step alone: a stream keeps at least
half of its speed. docs/choosing_targets.md has the cost of other values."""

_ORDER: Final = {Latency.TTFT: 0, Latency.TPOT: 1, Latency.TBT: 2}
"""Places of latencies in the sentence: first tokens come before their gaps."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Targets of online requests, and the slowdown of their streams where no target bounds gaps."""

    slos: tuple[Slo, ...] = ()
    stream_slowdown: float | None = None
    """Longest added time of a step with online decodes, as a fraction of the time of the decodes
    alone. None: only targets bound it."""

    @classmethod
    def of(
        cls,
        policy: str,
        slos: Sequence[Slo],
        online_slowdown: float | None = None,
        stream_slowdown: float | None = None,
    ) -> Objective:
        """Return the objective for these targets, with defaults for latencies without a target.

        Args:
            policy: Name of the scheduling policy.
            slos: Targets that the operator gave.
            online_slowdown: Slowdown of the P99 TTFT, as a fraction; None for the default.
            stream_slowdown: See the field; None for the default.
        """
        bounded = {slo.latency for slo in slos}
        has_defaults = policy == POLICY_WITH_DEFAULTS
        if has_defaults and online_slowdown is None and Latency.TTFT not in bounded:
            online_slowdown = ONLINE_SLOWDOWN
        if has_defaults and stream_slowdown is None:
            stream_slowdown = STREAM_SLOWDOWN
        relative: tuple[Slo, ...] = ()
        if online_slowdown is not None:
            relative = (Slo(Latency.TTFT, Statistic.P99, tolerance=online_slowdown),)
        return cls((*slos, *relative), stream_slowdown)

    @property
    def bounds_streams(self) -> bool:
        """True when the slowdown of streams holds: no target bounds the gaps between tokens."""
        has_gaps = any(slo.latency is not Latency.TTFT for slo in self.slos)
        return self.stream_slowdown is not None and not has_gaps

    def sentence(self, *, keeps_conversations: bool = False) -> str:
        """Return the promise to online requests in words, for people.

        Args:
            keeps_conversations: The prefixes of online requests are kept in the cache.
        """
        parts = [_part(slo) for slo in sorted(self.slos, key=lambda slo: _ORDER[slo.latency])]
        if self.bounds_streams:
            assert self.stream_slowdown is not None
            parts.append(f"streams at no less than {_speed(self.stream_slowdown)} alone")
        if keeps_conversations:
            parts.append("conversations stay cached")
        if not parts:
            return "No latency, since online requests have no targets."
        text = ", ".join(parts)
        return f"{text[0].upper()}{text[1:]}."


_NAMES: Final = {
    Latency.TTFT: "first tokens",
    Latency.TPOT: "mean gaps of streams",
    Latency.TBT: "gaps between tokens",
}


def _part(slo: Slo) -> str:
    """Return the words for one target."""
    statistic = slo.statistic.value.replace("p", "P")
    return f"{_NAMES[slo.latency]} {_limit(slo)} ({statistic})"


def _limit(slo: Slo) -> str:
    if slo.limit_s is not None:
        return f"at most {slo.limit_s * 1e3:,.10g} ms"
    assert slo.tolerance is not None
    if slo.tolerance == 0:
        return "no later than alone" if slo.latency is Latency.TTFT else "no longer than alone"
    if slo.tolerance < 1:
        return f"within {slo.tolerance * 100:.3g}% of what they take alone"
    return f"at most {1 + slo.tolerance:.3g} times what they take alone"


def _speed(slowdown: float) -> str:
    """Return the least speed of a stream under a slowdown; "alone" is to follow."""
    if slowdown == 0:
        return "their speed"
    return f"{'half' if slowdown == 1 else f'{100 / (1 + slowdown):.3g}%'} of their speed"


def parse_slowdown(text: str, name: str) -> float:
    """Return a percentage such as ``10%`` as a fraction; ``name`` is what the error names.

    Raises:
        ConfigError: the text is no percentage.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*%", text.strip(), re.ASCII)
    if match is None:
        raise ConfigError(f"{name} must be a percentage such as 10%, got {text!r}")
    return float(match[1]) / 100
