"""Settings of co-serving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

from sglang_coserve.config.batch_api import BatchApiConfig
from sglang_coserve.config.flags import flag, setting
from sglang_coserve.core.control.objective import Objective, parse_slowdown
from sglang_coserve.core.control.slo import Latency, Slo, Statistic, parse_slo
from sglang_coserve.core.ranges import NOT_NEGATIVE, POSITIVE, SHARE
from sglang_coserve.core.scheduler_config import Overload
from sglang_coserve.errors import ConfigError
from sglang_coserve.logs import LOG_FORMATS

OFFLINE_OBJECTIVES = (
    *("batch", "batch-*", "best-effort", "best-effort-*", "flex", "offline", "sheddable*"),
)
"""What gateways of llm-d's guides call requests that nobody waits for."""


class ServerPolicy(NamedTuple):
    """The flags of a policy that servers offer. Names of flags are names of fields below."""

    own: Mapping[str, str] = MappingProxyType({})
    """Flags that set a field of the policy's class (``core.policies``), each with the name of that
    field. Policies that do not list a flag refuse it."""

    refused: tuple[str, ...] = ()
    """Flags for all policies that have no effect under this policy."""

    ignores_targets: bool = False
    """True when plans look at no targets, unless ``overload`` is ``shed``."""


_UTILITY: Final = {"offline_utility_ratio": "utility_ratio"}
_BUDGET: Final = "iteration_budget_ms"

OFFLINE_POLICIES: Final[Mapping[str, ServerPolicy]] = MappingProxyType(
    {
        "coserve": ServerPolicy(own=_UTILITY),
        "conserve": ServerPolicy(refused=(_BUDGET,)),
        "hygen": ServerPolicy(own={**_UTILITY, "step_prefill_tokens": "step_prefill_tokens"}),
        "bros": ServerPolicy(
            own={"base_batch_requests": "base_batch_requests"},
            refused=(_BUDGET, "offline_max_running", "overload"),
        ),
        "ooco": ServerPolicy(own={"offline_random_picks": "random_picks"}, refused=(_BUDGET,)),
        "non_preemptive": ServerPolicy(
            refused=(_BUDGET, "stream_slowdown", "safepoint_interval", "safepoint_decode_graphs"),
            ignores_targets=True,
        ),
    }
)
"""The policies that servers offer, by name."""


def _without_effect(policy: ServerPolicy) -> tuple[str, ...]:
    of_any = dict.fromkeys(name for other in OFFLINE_POLICIES.values() for name in other.own)
    return (*policy.refused, *(name for name in of_any if name not in policy.own))


FIELDS_WITHOUT_EFFECT: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {name: _without_effect(policy) for name, policy in OFFLINE_POLICIES.items()}
)
"""All flags that a server refuses under a policy, by policy (``test_settings_act``)."""

NO_CHECKPOINTS = "off"
CHECKPOINT_STRATEGIES = ("eager", "lazy")
"""Ways to choose when the KV of offline requests is copied to host memory."""

Pool = Literal["relaxed", "strict"]
"""relaxed: begins lines, and gives running ones away. strict: serves online requests, and takes
running lines over that suit it (OOCO §3.2)."""

_AUTO = "auto"


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
        "How much longer than without offline work the P99 TTFT of online requests may be. By "
        "default 10% under the policy coserve, unless a target for TTFT is given.",
        metavar="PERCENT",
    )
    stream_slowdown: str | None = setting(
        None,
        "How much longer than without offline work a step with online decodes may take: with "
        "100% streams keep at least half of their speed. A target for tpot or tbt replaces it. By "
        "default 100% under the policy coserve.",
        metavar="PERCENT",
    )
    offline_policy: str = setting(
        _AUTO,
        "When offline requests run: how every step is planned with a latency model, against the "
        "targets. auto: coserve.",
        choices=(_AUTO, *OFFLINE_POLICIES),
    )
    overload: str = setting(
        "best_effort",
        "What to do when online requests alone cannot meet their targets. best_effort: serve "
        "them all, late. shed: refuse those that can no longer meet their TTFT target, with "
        "503 and Retry-After.",
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
    offline_priority_below: float | None = setting(
        None,
        "Requests with a lower priority are offline: x-dynamo-request-priority, else "
        "nvext.agent_hints.priority, else priority, where nothing else names a class. By default "
        "no number names one.",
        type=float,
        metavar="N",
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
        "Write one JSON line for each step to this file: snapshot, plan and results, for coserve "
        "replay. Numbered where the file exists. Holds prompts' token ids.",
        metavar="PLANS.jsonl",
    )

    kv_checkpoint: str = setting(
        NO_CHECKPOINTS,
        "When the KV of offline requests is copied to host memory. eager: as it is made. lazy: "
        "when it is reclaimed, while online requests wait (docs/kv_checkpoint.md).",
        choices=(NO_CHECKPOINTS, *CHECKPOINT_STRATEGIES),
    )
    kv_checkpoint_host_gb: Annotated[float | None, POSITIVE] = setting(
        None,
        "Host memory for KV, in GB for each GPU; by default twice the device's KV memory.",
        type=float,
        metavar="GB",
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
        "What the engine is for a gateway with pools (docs/pools.md). relaxed: lines begin "
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
        if self.offline_policy == _AUTO:
            object.__setattr__(self, "offline_policy", "coserve")
        self.objective()  # Raises for a target that cannot be read.
        _check_kv_checkpoint(self, "kv_checkpoint_host_gb")
        _check_pools(self)
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

    @property
    def ignores_targets(self) -> bool:
        """True when plans look at no targets, so that requests cannot bring their own."""
        policy = OFFLINE_POLICIES[self.offline_policy]
        return policy.ignores_targets and self.overload != Overload.SHED.value

    @property
    def plans_online(self) -> bool:
        """True when online requests are refused by plans, also without offline ones."""
        return self.overload == Overload.SHED.value

    def policy_settings(self) -> dict[str, Any]:
        """Return the settings of the policy that were given, by their names there."""
        own = OFFLINE_POLICIES[self.offline_policy].own
        given = {setting: getattr(self, name) for name, setting in own.items()}
        return {setting: value for setting, value in given.items() if value is not None}

    def slos(self) -> tuple[Slo, ...]:
        """Return the SLOs of the objective."""
        return self.objective().slos

    def objective(self) -> Objective:
        """Return what online requests are promised; a target for every request counts for P99."""
        targets = (
            Slo(latency, Statistic.P99, limit_s=limit_ms / 1e3)
            for latency, limit_ms in (
                (Latency.TTFT, self.slo_ttft_ms),
                (Latency.TPOT, self.slo_tpot_ms),
            )
            if limit_ms is not None
        )
        slowdowns = (
            None if text is None else parse_slowdown(text, flag(name))
            for name, text in (
                ("online_slowdown", self.online_slowdown),
                ("stream_slowdown", self.stream_slowdown),
            )
        )
        return Objective.of(self.offline_policy, (*targets, *map(_slo, self.slo)), *slowdowns)


def _check_kv_checkpoint(config: CoserveConfig, name: str) -> None:
    """Refuse the field ``name``, which has no effect without checkpoints."""
    if name in config.changed() and config.kv_checkpoint == NO_CHECKPOINTS:
        raise ConfigError(
            f"{flag(name)} has no effect with {flag('kv_checkpoint')} {NO_CHECKPOINTS}: "
            f"leave it out, or choose {' or '.join(CHECKPOINT_STRATEGIES)}"
        )


def _check_pools(config: CoserveConfig) -> None:
    _check_kv_checkpoint(config, "kv_move_dir")
    if config.pool is None:
        return
    if config.kv_move_dir is None:
        raise ConfigError(
            f"{flag('pool')} needs {flag('kv_move_dir')}: without it every line that goes on in "
            "another engine would be computed again there"
        )
    if config.pool == "strict" and (
        config.ignores_targets or all(slo.latency is Latency.TTFT for slo in config.slos())
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
