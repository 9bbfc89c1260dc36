"""Latencies of recent online requests beside the no-interference baseline, for people.

An SLO names one statistic of one latency. A comparison has the same percentiles for every latency,
so that offline work that slows down streams is seen under an SLO for first tokens, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sglang_coserve.core.control.recent_values import SlicedValues
from sglang_coserve.metrics import milliseconds, summarize

_LEAST_S: Final = 1e-9
"""Shortest latency in the baseline that a ratio is computed to. Tokens that come together have a
gap of 0."""

_SHARES: Final = (0.5, 0.99)


class Percentiles(NamedTuple):
    """The median and the 99th percentile of values."""

    p50: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles | None:
        """Return the percentiles of values; None without values."""
        summary = summarize(values)
        if summary.p50_s is None or summary.p99_s is None:
            return None
        return cls(summary.p50_s, summary.p99_s)

    def over(self, alone: Percentiles | None) -> Percentiles | None:
        """Return the ratios to the percentiles in the baseline; None where they are undefined."""
        if alone is None or min(alone) < _LEAST_S:
            return None
        return Percentiles(self.p50 / alone.p50, self.p99 / alone.p99)


@dataclass(frozen=True, slots=True)
class LatencyComparison:
    """One latency of recent online requests, as measured and in the baseline."""

    values: int
    """Number of measured values."""

    measured_s: Percentiles | None
    alone_s: Percentiles | None
    """Percentiles in the baseline; None without a baseline."""

    ratio: Percentiles | None
    """Measured ÷ alone. Requests without a latency in the baseline are left out of the ratio."""

    @classmethod
    def of(cls, pairs: Sequence[tuple[float | None, float | None]]) -> LatencyComparison:
        """Compare the latencies of requests: for each as measured and alone, None where unknown."""
        both = [pair for pair in pairs if None not in pair]
        measured = [here for here, _ in pairs if here is not None]
        measured_s = Percentiles.of(measured)
        alone_s = Percentiles.of(alone for _, alone in both if alone is not None)
        paired_s = measured_s
        if len(both) < len(measured):
            paired_s = Percentiles.of(here for here, _ in both if here is not None)
        ratio = None if paired_s is None else paired_s.over(alone_s)
        return cls(len(measured), measured_s, alone_s, ratio)

    @classmethod
    def within(cls, measured: SlicedValues, alone: SlicedValues, now_s: float) -> LatencyComparison:
        """Compare two histograms."""
        count, quantiles_s = measured.read(now_s, *_SHARES)
        _, quantiles_alone_s = alone.read(now_s, *_SHARES)
        measured_s = Percentiles(*quantiles_s) if quantiles_s else None
        alone_s = Percentiles(*quantiles_alone_s) if quantiles_alone_s else None
        return cls(count, measured_s, alone_s, measured_s.over(alone_s) if measured_s else None)

    def to_dict(self) -> dict[str, Any]:
        """Return the values for JSON, latencies in milliseconds."""
        return {
            "values": self.values,
            "measured_ms": _in_ms(self.measured_s),
            "online_alone_ms": _in_ms(self.alone_s),
            "ratio": _as_dict(self.ratio),
        }


_KEPT: Final = 0.99
"""Least share of streams within the limit: as for an SLO on a P99."""


@dataclass(frozen=True, slots=True)
class StreamStanding:
    """How much longer the gaps of recent streams were than alone.

    The slowdown of a stream is its mean gap ÷ the mean gap of the same request alone. Percentiles
    of gaps hide slow streams: the longest gaps alone are stalls behind prompts, and offline work
    often shortens these.
    """

    limit: float | None
    """Largest slowdown that is promised; None where the pace of streams does not hold."""

    streams: int
    """Streams with a slowdown: at least two tokens, no own target, and known in the baseline."""

    slowdown: Percentiles | None
    kept_share: float | None
    """Share of the streams within the limit; None without a limit or without streams."""

    @classmethod
    def of(
        cls, pairs: Iterable[tuple[float | None, float | None]], limit: float | None
    ) -> StreamStanding:
        """Judge streams: the mean gap of each as measured and alone, None where unknown."""
        ratios = [
            here_s / alone_s
            for here_s, alone_s in pairs
            if here_s is not None and alone_s is not None and alone_s >= _LEAST_S
        ]
        kept_share = None
        if limit is not None and ratios:
            kept_share = sum(ratio <= limit for ratio in ratios) / len(ratios)
        return cls(limit, len(ratios), Percentiles.of(ratios), kept_share)

    @property
    def is_met(self) -> bool:
        """True when at least 99% of the streams were within the limit."""
        return self.kept_share is None or self.kept_share >= _KEPT

    def to_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "streams": self.streams,
            "slowdown": _as_dict(self.slowdown),
            "limit": self.limit,
            "kept_share": self.kept_share,
            "met": self.is_met,
        }


def _as_dict(values: Percentiles | None) -> dict[str, float | None]:
    return dict.fromkeys(Percentiles._fields) if values is None else values._asdict()


def _in_ms(values_s: Percentiles | None) -> dict[str, float | None]:
    return {name: milliseconds(value) for name, value in _as_dict(values_s).items()}
