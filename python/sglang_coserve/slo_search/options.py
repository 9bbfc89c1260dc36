"""The options of a search, i.e. the flags of ``coserve profile slo``."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from sglang_coserve.core.control.slo import Slo, parse_slo
from sglang_coserve.errors import ConfigError
from sglang_coserve.slo_search.load import SearchLoad, read_online
from sglang_coserve.slo_search.machine import EngineMachine

__all__ = ["SearchOptions", "ValidationOptions"]

_POLICIES: Final = ("coserve", "hygen")
"""Policies that observe a step budget."""


@dataclass(frozen=True)
class ValidationOptions:
    """How to run the real server."""

    model_path: str
    flags: tuple[str, ...] = ()
    """SGLang's flags other than the model."""

    seconds: float = 60.0
    max_runs: int = 4

    @property
    def server_flags(self) -> tuple[str, ...]:
        """The model and SGLang's flags."""
        return ("--model-path", self.model_path, *self.flags)


@dataclass(frozen=True)
class SearchOptions:
    """The SLOs, the load and the engine of a search.

    Raises:
        ConfigError: on construction, if a value is invalid.
    """

    profile: Path
    slo: tuple[str, ...]
    trace: Path | None = None
    rate: float = 1.0
    duration: float | None = None
    offline: str = "512x32"
    offline_concurrency: int = 64
    policy: str = "coserve"
    kv_capacity_tokens: int | None = None
    page_tokens: int | None = None
    max_running: int | None = None
    max_batch_tokens: int | None = None
    max_context_tokens: int | None = None
    max_runs: int = 16
    seed: int = 0
    validation: ValidationOptions | None = None
    """None to simulate only."""

    def __post_init__(self) -> None:
        """Check the values that are not checked elsewhere."""
        if self.policy not in _POLICIES:
            raise ConfigError(
                f"--policy {self.policy}: only {' and '.join(_POLICIES)} take an iteration budget"
            )
        if self.duration is not None and not 0 < self.duration < math.inf:
            raise ConfigError(f"--duration {self.duration}: it must be a positive number")
        if self.offline == "none":
            raise ConfigError("--offline none: without offline requests no budget is needed")
        if self.max_runs < 2:
            raise ConfigError(f"--max-runs {self.max_runs}: a search needs at least 2")
        if not self.slo:
            raise ConfigError("no --slo given: any budget would do")
        self.slos()

    def slos(self) -> tuple[Slo, ...]:
        """Return the SLOs.

        Raises:
            ConfigError: one of them cannot be parsed.
        """
        return tuple(map(parse_slo, self.slo))

    def machine(self, known: EngineMachine) -> EngineMachine:
        """Return the engine to model: ``known`` with the limits given here."""
        return known.with_given(
            kv_capacity_tokens=self.kv_capacity_tokens,
            page_tokens=self.page_tokens,
            max_running=self.max_running,
            max_batch_tokens=self.max_batch_tokens,
            max_context_tokens=self.max_context_tokens,
        )

    def load(self, machine: EngineMachine, seconds: float | None) -> SearchLoad:
        """Return the first ``seconds`` of the load, or all of it for None.

        Raises:
            CoserveError: the trace cannot be used.
        """
        context_tokens = min(machine.max_context_tokens, machine.kv_capacity_tokens)
        online, cut = read_online(
            self.trace, rate=self.rate, seconds=seconds, max_context_tokens=context_tokens
        )
        return SearchLoad(
            online=online,
            offline=self.offline,
            offline_concurrency=self.offline_concurrency,
            # Even a trace with a single arrival time takes some time to serve.
            seconds=seconds or max(online[-1].arrival_s, 1.0),
            max_context_tokens=context_tokens,
            cut=cut,
            seed=self.seed,
        )

    def to_dict(self) -> dict[str, object]:
        """Return the fields, ready for JSON."""
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self).items()
        }
