"""Settings of co-serving."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, get_args

from sglang_coserve.config.batch_api import BatchApiConfig
from sglang_coserve.config.flags import NOT_NEGATIVE, POSITIVE, SHARE, flag, setting
from sglang_coserve.core.control.slo import Latency, Slo, Statistic, parse_slo
from sglang_coserve.core.engine_load import Pool
from sglang_coserve.core.kv_checkpoint import CheckpointMode
from sglang_coserve.core.scheduler_config import Overload
from sglang_coserve.errors import ConfigError
from sglang_coserve.logs import LOG_FORMATS

OFFLINE_POLICIES = ("fifo", "coserve", "conserve", "hygen", "bros", "ooco", "non_preemptive")
"""Ways to decide when offline requests run."""

OFFLINE_OBJECTIVES = (
    *("batch", "batch-*", "best-effort", "best-effort-*", "flex", "offline", "sheddable*"),
)
"""What gateways of llm-d's guides call requests that nobody waits for."""

_BUDGET, _SHEDDING = "iteration_budget_ms", "overload"
_UTILITY, _RANDOM = "offline_utility_ratio", "offline_random_picks"
_CHUNK, _BASE = "step_prefill_tokens", "base_batch_requests"
_SAFEPOINTS = ("safepoint_interval", "safepoint_decode_graphs")

FIELDS_WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fifo": (
            *(_BUDGET, _SHEDDING, _UTILITY, _RANDOM, _CHUNK, _BASE),
            *("startup_profile_seconds", "record_plans", "online_slowdown", *_SAFEPOINTS),
        ),
        "coserve": (_RANDOM, _CHUNK, _BASE),
        "conserve": (_BUDGET, _UTILITY, _RANDOM, _CHUNK, _BASE),
        "hygen": (_RANDOM, _BASE),
        "bros": (_BUDGET, "offline_max_running", _SHEDDING, _UTILITY, _RANDOM, _CHUNK),
        "ooco": (_BUDGET, _UTILITY, _CHUNK, _BASE),
        "non_preemptive": (_BUDGET, _UTILITY, _RANDOM, _CHUNK, _BASE, *_SAFEPOINTS),
    }
)
"""By policy: what it would not act on, and is refused with it (``test_settings_act``)."""

_COPIES = tuple(mode.value for mode in CheckpointMode if mode is not CheckpointMode.OFF)
_CHECKPOINT_MODES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "kv_checkpoint_host_gb": _COPIES,
        "kv_checkpoint_watermark": (CheckpointMode.PRESSURE.value,),
        "kv_move_dir": _COPIES,
    }
)
"""By flag: the modes of --kv-checkpoint that it is for."""

_AUTO = "auto"
_SLOWDOWN = "10%"
"""What --online-slowdown is where nobody says anything about targets or policy."""


@dataclass(frozen=True, slots=True)
class CoserveConfig(BatchApiConfig):
    """Settings of co-serving; every field is a command-line flag of the same name.

    Raises:
        ConfigError: on construction, when a value is out of its range.
    """

    slo_ttft_ms: Annotated[float | None, POSITIVE] = setting(
        None,
        "Target in milliseconds for the time to first token of every online request that "
        "brings none of its own.",
        type=float,
        metavar="MS",
    )
    slo_tpot_ms: Annotated[float | None, POSITIVE] = setting(
        None,
        "The same for the mean time per output token after the first.",
        type=float,
        metavar="MS",
    )
    slo: tuple[str, ...] = setting(
        (),
        "Bounds on statistics over the online requests, all to be met at once: 'ttft p99 <= "
        "300ms' 'tpot mean <= 50ms'. Latencies are ttft, tpot (mean of a request) and tbt "
        "(every gap between tokens), statistics mean, p50, p90 and p99; '<= +10%' is over what "
        "the same requests would get without offline work.",
        nargs="+",
        action="extend",
        metavar="SLO",
    )
    online_slowdown: str | None = setting(
        None,
        "How much longer than without offline work P99 TTFT and the P99 gap between tokens may "
        "be, as predicted: docs/policies.md. By default 10% where no target and no "
        "--offline-policy is given.",
        metavar="PERCENT",
    )
    offline_policy: str = setting(
        _AUTO,
        "When offline requests run. fifo: first come, first served, whenever no online request "
        "waits. The others plan every step with a latency model, against the targets. auto: "
        "coserve.",
        choices=(_AUTO, *OFFLINE_POLICIES),
    )
    overload: str = setting(
        "best_effort",
        "What to do when online requests alone cannot meet their targets. best_effort: serve "
        "them all, late. shed: refuse those that can no longer meet their TTFT target, with "
        "503 and Retry-After. For policies that plan.",
        choices=tuple(overload.value for overload in Overload),
    )
    offline_objectives: tuple[str, ...] = setting(
        OFFLINE_OBJECTIVES,
        "Requests with one of these in the header x-llm-d-inference-objective (or "
        "x-gateway-inference-objective), which gateways set, are offline; with any other "
        "online. * stands for any text.",
        nargs="+",
        metavar="NAME",
    )
    offline_utility_ratio: Annotated[float | None, SHARE] = setting(
        None,
        "How often the next offline request is one that shares a prefix with those before it, "
        "rather than the one that has waited longest: HyGen's utility ratio, from 0 to 1, 0.95 "
        "by default.",
        type=float,
        metavar="SHARE",
    )
    offline_random_picks: Annotated[int | None, NOT_NEGATIVE] = setting(
        None,
        "How many offline decodes are drawn at random for a step that cannot hold all of them, "
        "before the shortest fill it up: K of OOCO's mix decoding selection, 8 by default.",
        type=int,
        metavar="N",
    )
    step_prefill_tokens: Annotated[int | None, POSITIVE] = setting(
        None,
        "Most prompt tokens of a step, of online and offline requests together: HyGen's chunk "
        "size C, 512 by default.",
        type=int,
        metavar="N",
    )
    base_batch_requests: Annotated[int | None, POSITIVE] = setting(
        None,
        "How many requests a step may have again after a deadline limited one; until then the "
        "number doubles with each step: BROS's B_base, 128 by default.",
        type=int,
        metavar="N",
    )
    offline_max_running: Annotated[int | None, POSITIVE] = setting(
        None,
        "Most offline requests that may run at once; by default bounded only by "
        "--max-running-requests and by memory.",
        type=int,
        metavar="N",
    )

    latency_profile: str | None = setting(
        None,
        "Latency profile of this model on this machine, from coserve profile.",
        metavar="PROFILE.json",
    )
    startup_profile_seconds: Annotated[float, NOT_NEGATIVE] = setting(
        10.0,
        "How long to profile at start-up when there is no --latency-profile; 0: not at all, "
        "the model's shape and the device's peaks give a first guess.",
        type=float,
        metavar="S",
        is_off_at_zero=True,
    )
    iteration_budget_ms: Annotated[float | None, POSITIVE] = setting(
        None,
        "Longest step, as predicted, that offline work may make, in milliseconds; coserve "
        "simulate --find-budget finds one. By default the deadlines of the online requests "
        "alone decide.",
        type=float,
        metavar="MS",
    )
    safepoint_interval: Annotated[int | None, NOT_NEGATIVE] = setting(
        None,
        "Suspend a step of offline requests for online ones before every N-th layer of the "
        "model, at most a quarter of the layers; 0: never. By default 4 on a CPU, and 0 on a "
        "GPU, where outputs were not compared yet.",
        type=int,
        metavar="N",
        is_off_at_zero=True,
    )
    safepoint_decode_graphs: bool = setting(
        False,
        "On a GPU, also capture decode steps as one CUDA graph per group of layers, so that "
        "those of offline requests can be suspended too. Start-up takes longer, and graphs "
        "more memory.",
        action="store_true",
    )
    record_plans: str | None = setting(
        None,
        "Write every scheduling decision and what it was made from to this file, for coserve "
        "replay; numbered where it exists. Holds prompts' token ids.",
        metavar="PLANS.jsonl",
    )

    kv_checkpoint: str = setting(
        CheckpointMode.OFF.value,
        "When the KV of offline requests is copied to host memory. eager: as it is made. lazy: "
        "when it is reclaimed, while online requests wait. pressure: as eager, while the "
        "device's KV memory is nearly full (docs/kv_checkpoint.md).",
        choices=tuple(mode.value for mode in CheckpointMode),
    )
    kv_checkpoint_host_gb: Annotated[float | None, POSITIVE] = setting(
        None,
        "Host memory for KV, in GB for each GPU; by default twice the device's KV memory.",
        type=float,
        metavar="GB",
    )
    kv_checkpoint_watermark: Annotated[float, SHARE] = setting(
        0.8,
        "Part of the device's KV memory in use above which --kv-checkpoint pressure copies.",
        type=float,
        metavar="SHARE",
    )
    kv_move_dir: str | None = setting(
        None,
        "Directory, the same one for several engines, through which the KV of a line goes with "
        "it from an engine that gives it back to the one that goes on. Nobody but their user "
        "may read it. By default only tokens go.",
        metavar="DIRECTORY",
    )

    pool: Pool | None = setting(
        None,
        "What the engine is for a gateway with pools (docs/fleet.md). relaxed: lines begin "
        "here. strict: online requests are served here, and running lines that suit its "
        "targets go on here. Needs --kv-move-dir.",
        choices=get_args(Pool),
    )

    media_sources: str = setting(
        "public",
        "Where images, videos and sounds may come from. inline: the request itself. public: "
        "http(s) addresses in the internet, too. any: whatever SGLang opens, private addresses "
        "and files of this machine among it.",
        choices=("inline", "public", "any"),
    )

    log_format: str = setting(
        LOG_FORMATS[0],
        "text: as SGLang writes its log. json: each record of every process as one line of JSON, "
        "with the request_id of the request that it is about.",
        choices=LOG_FORMATS,
    )
    open_view: bool = setting(
        False,
        "Show the engine's figures at /coserve to everybody who reaches the port; batches and "
        "buttons still need a key.",
        action="store_true",
    )

    def __post_init__(self) -> None:
        for name in ("slo", "offline_objectives"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # argparse makes a list.
        BatchApiConfig.__post_init__(self)
        slos = self.slos()  # Raises for one that is none.
        if self.offline_policy == _AUTO:
            object.__setattr__(self, "offline_policy", "coserve")
            if not slos:
                object.__setattr__(self, "online_slowdown", _SLOWDOWN)
        _check_kv_checkpoint(self)
        _check_pool(self)
        self._refuse_flags_without_effect()

    def _refuse_flags_without_effect(self) -> None:
        """Refuse what would change nothing."""
        changed = self.changed()
        if self.safepoint_decode_graphs and "safepoint_interval" not in changed:
            raise ConfigError(
                f"{flag('safepoint_decode_graphs')} has no effect alone: add "
                f"{flag('safepoint_interval')}"
            )
        for name in FIELDS_WITHOUT_EFFECT[self.offline_policy]:
            if name in changed:
                raise ConfigError(
                    f"{flag(name)} has no effect with --offline-policy {self.offline_policy}: "
                    "leave it out, or choose another policy"
                )
        if self.offline_policy == "fifo" and any(slo.limit_s is None for slo in self.slos()):
            raise ConfigError(
                f"{flag('slo')}: a target relative to online requests alone has no effect with "
                "--offline-policy fifo, which predicts nothing: choose another policy"
            )

    @property
    def checkpoint_mode(self) -> CheckpointMode:
        """When KV is copied to the host."""
        return CheckpointMode(self.kv_checkpoint)

    @property
    def keeps_deadlines(self) -> bool:
        """True when offline requests are served by their deadlines."""
        return self.offline_policy != "fifo"

    @property
    def ignores_targets(self) -> bool:
        """True when plans look at no targets, so that requests cannot bring their own.

        Under fifo there are no plans: there a target says by what a request is judged.
        """
        return self.offline_policy == "non_preemptive" and self.overload != Overload.SHED.value

    @property
    def plans_online(self) -> bool:
        """True when online requests are refused by plans, also without offline ones."""
        return self.overload == Overload.SHED.value

    def slos(self) -> tuple[Slo, ...]:
        """Return all SLOs; a target for every request counts as one for P99."""
        targets = (
            Slo(latency, Statistic.P99, limit_s=limit_ms / 1e3)
            for latency, limit_ms in (
                (Latency.TTFT, self.slo_ttft_ms),
                (Latency.TPOT, self.slo_tpot_ms),
            )
            if limit_ms is not None
        )
        relative: tuple[Slo, ...] = ()
        if self.online_slowdown is not None:
            tolerance = _slowdown(self.online_slowdown)
            relative = (
                Slo(Latency.TTFT, Statistic.P99, tolerance=tolerance),
                Slo(Latency.TBT, Statistic.P99, tolerance=tolerance),
            )
        return (*targets, *map(_slo, self.slo), *relative)


def _check_kv_checkpoint(config: CoserveConfig) -> None:
    changed = config.changed()
    for name, useful in _CHECKPOINT_MODES.items():
        if name in changed and config.kv_checkpoint not in useful:
            raise ConfigError(
                f"{flag(name)} has no effect with {flag('kv_checkpoint')} "
                f"{config.kv_checkpoint}: leave it out, or choose {' or '.join(useful)}"
            )


def _check_pool(config: CoserveConfig) -> None:
    if config.pool is None:
        return
    if config.kv_move_dir is None:
        raise ConfigError(
            f"{flag('pool')} needs {flag('kv_move_dir')}: without it every line that goes on in "
            "another engine would be computed again there"
        )
    if config.pool == "strict" and (
        config.offline_policy == "fifo"
        or config.ignores_targets
        or all(slo.latency is Latency.TTFT for slo in config.slos())
    ):
        raise ConfigError(
            f"{flag('pool')} strict needs a bound on the time between tokens and a policy that "
            f"plans by it: give {flag('slo_tpot_ms')} or another {flag('slo')} on tpot or tbt, "
            f"and leave out {flag('offline_policy')} {config.offline_policy}"
        )


def _slo(text: str) -> Slo:
    try:
        return parse_slo(text)
    except ConfigError as error:
        raise ConfigError(f"{flag('slo')}: {error}") from error


def _slowdown(text: str) -> float:
    """Return a percentage as a fraction."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*%", text.strip(), re.ASCII)
    if match is None:
        raise ConfigError(
            f"{flag('online_slowdown')} must be a percentage such as 10%, got {text!r}"
        )
    return float(match[1]) / 100
