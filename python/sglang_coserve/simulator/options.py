"""The options of a simulation: the flags of ``coserve simulate``, and what they stand for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Final

from sglang_coserve.core.control.objective import Objective, parse_slowdown
from sglang_coserve.core.control.slo import deadlines, parse_slo, request_targets
from sglang_coserve.core.latency_model.operators import kv_capacity_tokens
from sglang_coserve.core.request import RequestClass
from sglang_coserve.core.scheduler_config import SchedulerConfig
from sglang_coserve.errors import ConfigError
from sglang_coserve.metrics import SloTargets
from sglang_coserve.profiler.fits import load_profile
from sglang_coserve.simulator.assemble import LENGTHS, SimulatedMachine, offline_requests
from sglang_coserve.simulator.binding import from_trace
from sglang_coserve.simulator.executor_config import ExecutorConfig, SafepointConfig
from sglang_coserve.simulator.flags import SimulationFlags
from sglang_coserve.simulator.run import BASELINES, SimulationSetup, Workload
from sglang_coserve.workload.shape import fit_to_context, scale_rate, until
from sglang_coserve.workload.trace import TraceRequest, read_trace, sample_path

_CHUNKED: Final = "hygen"
"""Name of the policy that ``step_prefill_tokens`` is for. Options import no policy, so a change of
one policy leaves the results of the others as they are."""


@dataclass(frozen=True)
class SimulationOptions(SimulationFlags):
    """The flags, and what they stand for.

    Methods raise ``CoserveError`` if a file or name cannot be used.

    Raises:
        ConfigError: a number is out of range; the message names it.
    """

    def __post_init__(self) -> None:
        """Check the values that are not checked elsewhere."""
        object.__setattr__(self, "slo", list(self.slo or ()))
        for name in ("slo_ttft_ms", "slo_tpot_ms", "duration"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"simulation: {name} is {value}: it must be a positive number")
        if self.slo and (self.slo_ttft_ms or self.slo_tpot_ms):
            raise ConfigError("simulation: use slo, or slo_ttft_ms and slo_tpot_ms, not both")
        for name in ("backlog", "safepoint_layers", "checkpoint_gb_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"simulation: {name} is {value}: it must be at least 0")
        self._slowdowns()
        if self.step_prefill_tokens is not None and _CHUNKED not in self.policies:
            raise ConfigError("simulation: step_prefill_tokens is for the policy hygen")

    @property
    def policies(self) -> list[str]:
        """The names of the policies."""
        return [name.strip() for name in self.policy.split(",")]

    @cached_property
    def machine(self) -> SimulatedMachine:
        """The model and the devices."""
        return SimulatedMachine.named(self.model, self.hardware, self.tp_size)

    def setup(self, policy: str) -> SimulationSetup:
        """Return the machine and the scheduler's settings for the policy of this name."""
        machine = self.machine
        has_mechanisms = policy not in BASELINES
        copied_bytes_per_s = self.checkpoint_gb_s * 1e9 * has_mechanisms
        safepoint_layers = self.safepoint_layers * has_mechanisms
        slos = tuple(map(parse_slo, self.slo or ()))
        targets = SloTargets.of_ms(self.slo_ttft_ms, self.slo_tpot_ms)
        if slos:
            targets = request_targets([slo for slo in slos if slo.limit_s is not None])
        objective = Objective.of(policy, slos or deadlines(targets), *self._slowdowns())
        return SimulationSetup(
            model=load_profile(self.profile).latency_model if self.profile else machine.roofline(),
            true_model=load_profile(self.true_profile).latency_model if self.true_profile else None,
            targets=targets,
            slos=objective.slos,
            scheduler=SchedulerConfig(
                seed=self.seed,
                stream_slowdown=objective.stream_slowdown,
            ),
            executor=ExecutorConfig(
                kv_capacity_tokens=self._capacity_tokens(),
                page_tokens=self.page_tokens,
                max_running_requests=self.max_running,
                max_batch_tokens=self.max_batch_tokens,
                prefix_cache=self.prefix_cache,
                checkpoint_tokens_per_s=machine.copied_tokens_per_s(copied_bytes_per_s),
                safepoint=SafepointConfig(machine.shape.num_layers, safepoint_layers)
                if safepoint_layers
                else None,
                overlap=self.overlap,
                paced=has_mechanisms,
                noise_cv=self.noise,
                seed=self.seed,
            ),
        )

    def policy_settings(self, policy: str) -> dict[str, int]:
        """Return the settings that flags give the policy of this name.

        Only ``hygen`` has a setting with a flag; all others have their defaults.
        """
        if policy != _CHUNKED or self.step_prefill_tokens is None:
            return {}
        return {"step_prefill_tokens": self.step_prefill_tokens}

    def _slowdowns(self) -> list[float | None]:
        names = ("online_slowdown", "stream_slowdown")
        texts = [(name, getattr(self, name)) for name in names]
        return [
            None if text is None else parse_slowdown(text, f"simulation: {name}")
            for name, text in texts
        ]

    def workload(self) -> Workload:
        """Read the requests."""
        context_tokens = self._context_tokens()
        online = self.online_trace()
        last_s = online[-1].arrival_s if self.backlog and online else 0.0
        interval_s = self.duration or last_s or math.inf
        if LENGTHS.fullmatch(self.offline or "") and (not self.backlog or interval_s == math.inf):
            raise ConfigError(
                f"simulation: offline {self.offline} never ends: use a backlog, and a duration "
                "where no online request comes later than the first"
            )
        return Workload(
            online=partial(from_trace, online, RequestClass.ONLINE, seed=self.seed),
            offline=offline_requests(
                self.offline or str(sample_path("offline")),
                max_context_tokens=context_tokens,
                seed=self.seed,
            ),
            backlog_depth=self.backlog,
            interval_s=interval_s,
        )

    def online_trace(self) -> Sequence[TraceRequest]:
        """Read the online requests, at the rate and for the duration asked for."""
        trace = read_trace(self.trace or sample_path("online"))
        in_time = until(scale_rate(trace, self.rate), self.duration or math.inf)
        online, _ = fit_to_context(in_time, self._context_tokens())
        return online

    def to_dict(self) -> dict[str, object]:
        """Return the fields, ready for JSON."""
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in asdict(self).items()
        }

    def _capacity_tokens(self) -> int:
        if self.kv_capacity_tokens is not None:
            return self.kv_capacity_tokens
        machine = self.machine
        return kv_capacity_tokens(machine.shape, machine.hardware, tp_size=self.tp_size)

    def _context_tokens(self) -> int:
        """Return the length of the longest request, by the options and the device's memory."""
        whole_pages = self._capacity_tokens() // self.page_tokens * self.page_tokens
        return min(self.max_context_tokens, whole_pages)
