"""Sweeps settings over one workload: what each costs online requests, and brings offline ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from sglang_coserve.core.control.objective import (
    ONLINE_SLOWDOWN,
    POLICY_WITH_DEFAULTS,
    STREAM_SLOWDOWN,
)
from sglang_coserve.core.policies import make_policy
from sglang_coserve.core.policies.baselines import SarathiPolicy
from sglang_coserve.core.policy import Policy
from sglang_coserve.errors import ConfigError
from sglang_coserve.metrics import Summary, latency_report
from sglang_coserve.simulator.flags import SimulationFlags
from sglang_coserve.simulator.observer import RunControl
from sglang_coserve.simulator.options import SimulationOptions
from sglang_coserve.simulator.report import text_table
from sglang_coserve.simulator.result import LABEL, SimulationResult
from sglang_coserve.simulator.run import simulate

STREAM_SLOWDOWNS: Final = (0.25, 0.5, 1.0, 2.0)
"""Slowdowns of streams, as fractions."""

GAPS_MS: Final = (15, 25, 40)
"""Targets of the P99 gap between tokens."""

CHUNK_TOKENS: Final = (256, 512, 1024, 2048)
"""Sizes of mixed chunks."""

_SWEPT: Final = ("policy", "slo", "slo_ttft_ms", "slo_tpot_ms", "stream_slowdown")
"""Options that the sweep sets."""

_COLUMNS: Final = (
    *("setting", "TTFT P50 ms", "P99", "gap P50 ms", "P99", "TPOT P99 ms", "offline tok/s"),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One run of a sweep."""

    name: str
    options: SimulationOptions
    policy: Policy
    flags: tuple[str, ...] = ()
    """Flags of a server with this setting."""

    def run(self, control: RunControl, place: str) -> SimulationResult:
        """Simulate; ``control`` shows the progress and the place, and may end the run early."""
        workload = self.options.workload()
        control.begin(self.name + place, workload.interval_s)
        setup = self.options.setup(self.policy.name)
        return simulate(workload, setup, self.policy, on_progress=control.tick)


class Sweep:
    """The runs of a sweep; completed ones remain available when it ends early."""

    def __init__(self, options: SimulationOptions, control: RunControl) -> None:
        """Check the options.

        Args:
            options: Machine and workload. The slowdown of first tokens is for every run of ours.
            control: Shows progress, and may end the sweep early.

        Raises:
            ConfigError: ``options`` set what the sweep sets, or have no offline requests.
        """
        usual = SimulationFlags()
        given = [
            name for name in _SWEPT if getattr(options, name) not in (getattr(usual, name), [])
        ]
        if given:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ConfigError(f"--sweep sets {names} for each of its runs: leave them out")
        if options.offline == "none":
            raise ConfigError("--offline none: without offline requests all settings are equal")
        self._options = options
        self._control = control
        self._results: list[tuple[Setting, SimulationResult]] = []

    @property
    def settings(self) -> Iterator[Setting]:
        """The settings in the order of their runs: online requests alone, ours, stock-like."""
        ours = replace(self._options, policy=POLICY_WITH_DEFAULTS)

        def policy() -> Policy:
            return make_policy(POLICY_WITH_DEFAULTS)

        yield Setting("online alone", replace(ours, offline="none"), policy())
        for slowdown in STREAM_SLOWDOWNS:
            text = f"{slowdown:.0%}"
            name = f"ours, streams +{text}" + ", the default" * (slowdown == STREAM_SLOWDOWN)
            options = replace(ours, stream_slowdown=text)
            yield Setting(name, options, policy(), ("--stream-slowdown", text))
        for gap_ms in GAPS_MS:
            slo = f"tbt p99 <= {gap_ms}ms"
            options = replace(ours, slo=[slo])
            yield Setting(f"ours, P99 gap {gap_ms} ms", options, policy(), ("--slo", slo))
        for tokens in CHUNK_TOKENS:
            stock = replace(self._options, policy=SarathiPolicy.name, online_slowdown=None)
            yield Setting(
                f"stock-like, mixed chunks of {tokens:,}",
                stock,
                SarathiPolicy(chunk_tokens=tokens),
                (
                    *("--enable-priority-scheduling", "--enable-mixed-chunk"),
                    *("--chunked-prefill-size", str(tokens)),
                ),
            )

    def run(self) -> None:
        """Run all settings.

        Raises:
            CoserveError: an option or a file cannot be used.
        """
        settings = list(self.settings)
        for number, setting in enumerate(settings, start=1):
            if self._control.should_stop:
                return
            place = f" ({number} of {len(settings)})"
            self._results.append((setting, setting.run(self._control, place)))

    def to_text(self) -> str:
        """Return the table of all runs so far."""
        table = text_table(_COLUMNS, [_cells(*one) for one in self._results])
        slowdown = self._options.online_slowdown or f"{ONLINE_SLOWDOWN:.0%}"
        return (
            f"{table}ours: first tokens within {slowdown} of alone (P99), as far as streams and "
            "gaps allow\n"
            "stock-like: priorities, decodes in every chunk; online prompts go before offline ones "
            "that have begun\n"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings and the results, for JSON."""
        return {
            "label": LABEL,
            "settings": self._options.to_dict(),
            "runs": [
                {"name": setting.name, "flags": list(setting.flags), **result.to_dict()}
                for setting, result in self._results
            ],
        }


def _cells(setting: Setting, result: SimulationResult) -> list[str]:
    latency = latency_report(result.online)
    has_offline = setting.options.offline != "none"
    tokens = f"{result.offline_throughput.total_tokens_per_s:,.0f}" if has_offline else "-"
    return [
        setting.name + ("" if result.is_complete else " (broken off)"),
        *_ms(latency.ttft),
        *_ms(latency.itl),
        _ms(latency.tpot)[1],
        tokens,
    ]


def _ms(summary: Summary) -> tuple[str, str]:
    """Return P50 and P99."""
    p50, p99 = (
        "-" if value_s is None else f"{value_s * 1e3:,.1f}"
        for value_s in (summary.p50_s, summary.p99_s)
    )
    return p50, p99
