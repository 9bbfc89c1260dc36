"""Settings of co-serving: one frozen dataclass, from which the CLI flags are made."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Self, get_origin, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from sglang_coserve.core.control.slo import Latency, Slo, Statistic, parse_slo, request_targets
from sglang_coserve.core.kv_checkpoint import CheckpointMode
from sglang_coserve.core.scheduler_config import OnlineOrder, Overload
from sglang_coserve.core.validation import STRICT, explain
from sglang_coserve.errors import ConfigError
from sglang_coserve.metrics import SloTargets

__all__ = ["FIELDS_WITHOUT_EFFECT", "OFFLINE_POLICIES", "BatchApiConfig", "CoserveConfig"]

OFFLINE_POLICIES = ("fifo", "coserve", "conserve", "hygen", "bros", "ooco", "non_preemptive")
"""Ways to decide when offline requests run."""

_BUDGET, _SHEDDING = "iteration_budget_ms", "overload"
_UTILITY, _RANDOM = "offline_utility_ratio", "offline_random_picks"
_SAFEPOINTS = ("safepoint_interval", "safepoint_decode_graphs")

FIELDS_WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fifo": (
            *(_BUDGET, "online_order", _SHEDDING, _UTILITY, _RANDOM),
            *("startup_profile_seconds", "record_plans", "online_slowdown", *_SAFEPOINTS),
        ),
        "coserve": (_RANDOM,),
        "conserve": (_BUDGET, _UTILITY, _RANDOM),
        "hygen": (_RANDOM,),
        "bros": (_BUDGET, "offline_max_running", _SHEDDING, _UTILITY, _RANDOM),
        "ooco": (_BUDGET, _UTILITY),
        "non_preemptive": (_BUDGET, _UTILITY, _RANDOM, *_SAFEPOINTS),
    }
)
"""By policy: what it would not act on, and is refused with it (``test_settings_act``)."""

_NEEDS: Mapping[str, str] = MappingProxyType(
    {
        "safepoint_decode_graphs": "safepoint_interval",
        "batch_max_upload_mib": "coserve_data_dir",
        "batch_max_lines": "coserve_data_dir",
        "batch_max_in_flight": "coserve_data_dir",
        "batch_max_active": "coserve_data_dir",
        "batch_max_active_per_key": "coserve_data_dir",
        "batch_max_stored_gib_per_key": "coserve_data_dir",
        "batch_webhook_url": "coserve_data_dir",
        "batch_webhook_allow_private": "batch_webhook_url",
    }
)
"""Flags that do nothing without another one."""

_COPIES = tuple(mode.value for mode in CheckpointMode if mode is not CheckpointMode.OFF)
_CHECKPOINT_MODES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "kv_checkpoint_host_gb": _COPIES,
        "kv_checkpoint_offline_share": _COPIES,
        "kv_checkpoint_online_share": _COPIES,
        "kv_checkpoint_watermark": (CheckpointMode.PRESSURE.value,),
        "kv_move_dir": _COPIES,
    }
)
"""By flag: the modes of --kv-checkpoint that it is for."""

_OFF_AT_ZERO = ("startup_profile_seconds", "safepoint_interval")
"""Flags whose 0 asks for nothing, so that it may always be given."""

MEDIA_SOURCES = ("inline", "public", "any")

ONLINE_ORDERS = tuple(order.value for order in OnlineOrder)
OVERLOADS = tuple(overload.value for overload in Overload)

_AUTO = "auto"
_SLOWDOWN = "10%"
"""What --online-slowdown is where nobody says anything about targets or policy."""

_POSITIVE = Field(gt=0)
_NOT_NEGATIVE = Field(ge=0)
_SHARE = Field(ge=0, le=1)


def _setting(default: Any, doc: str, **cli: Any) -> Any:
    """A field whose docstring is also the help of its flag."""
    return dataclasses.field(default=default, metadata={"doc": doc, "cli": cli})


@dataclass(frozen=True, slots=True)
class BatchApiConfig:
    """Settings of the Batch API, of one engine or before many; every field is a flag.

    Raises:
        ConfigError: on construction, when a value is out of its range.
    """

    coserve_data_dir: str | None = _setting(
        None,
        "Directory of the Batch API: what users upload, its results, and what is still to do. "
        "Made when it is not there; for one server at a time. Without one, /v1/files and "
        "/v1/batches are off, so that nothing is kept unasked.",
        metavar="DIRECTORY",
    )
    batch_max_upload_mib: Annotated[int, _POSITIVE] = _setting(
        200, "Largest file that may be uploaded for a batch, in MiB.", type=int, metavar="MIB"
    )
    batch_max_lines: Annotated[int, _POSITIVE] = _setting(
        50_000, "Most requests in one batch.", type=int, metavar="N"
    )
    batch_max_in_flight: Annotated[int, _POSITIVE] = _setting(
        512,
        "Most lines of all batches that the engine has at once: it chooses among them by shared "
        "prefixes, and runs as many as fit.",
        type=int,
        metavar="N",
    )
    batch_max_active: Annotated[int, _POSITIVE] = _setting(
        256, "Most unfinished batches, of all API keys together.", type=int, metavar="N"
    )
    batch_max_active_per_key: Annotated[int | None, _POSITIVE] = _setting(
        None,
        "Most unfinished batches of one API key. By default as many as are still free of "
        "--batch-max-active, so half of it for one key alone.",
        type=int,
        metavar="N",
    )
    batch_max_stored_gib_per_key: Annotated[float | None, _POSITIVE] = _setting(
        None,
        "Most that the files of one API key may take on the disk, in GiB: uploads and results. "
        "What a running batch writes may exceed it; a new one is refused then. By default as much "
        "as is still free on the disk.",
        type=float,
        metavar="GIB",
    )
    batch_webhook_url: str | None = _setting(
        None,
        "Address that is told when a batch has completed, failed, expired or been cancelled. The "
        "secret to sign with is in the environment variable COSERVE_WEBHOOK_SECRET.",
        metavar="URL",
    )
    batch_webhook_allow_private: bool = _setting(
        False,
        "Let --batch-webhook-url be on this machine or in a private network.",
        action="store_true",
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))
        changed = _changed(self)
        for name, other in _NEEDS.items():
            if name in changed and other not in changed:
                raise ConfigError(f"{_flag(name)} has no effect alone: add {_flag(other)}")

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add one flag per field to ``parser``, in a group named coserve."""
        group = parser.add_argument_group(
            "coserve", "Serving online and offline requests on one engine."
        )
        # What a class adds to the Batch API comes first.
        for field in sorted(dataclasses.fields(cls), key=lambda field: field.name in _BATCH_API):
            group.add_argument(
                _flag(field.name),
                # argparse extends a copy of the default, which it can make of a list only.
                default=list(field.default) if field.default == () else field.default,
                help=field.metadata["doc"].replace("%", "%%"),
                **field.metadata["cli"],
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from the entries of ``values`` that name a field; others are ignored."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return dataclasses.asdict(self)


_BATCH_API = frozenset(field.name for field in dataclasses.fields(BatchApiConfig))


@dataclass(frozen=True, slots=True)
class CoserveConfig(BatchApiConfig):
    """Settings of co-serving; every field is a command-line flag of the same name.

    Raises:
        ConfigError: on construction, when a value is out of its range.
    """

    slo_ttft_ms: Annotated[float | None, _POSITIVE] = _setting(
        None,
        "Target for the time to first token of every online request that brings none of its own, "
        "in milliseconds. /coserve/status shows the share of requests within it.",
        type=float,
        metavar="MS",
    )
    slo_tpot_ms: Annotated[float | None, _POSITIVE] = _setting(
        None,
        "Target for the mean time per output token (after the first) of every online request "
        "that brings none of its own, in milliseconds. /coserve/status shows the share of "
        "requests within it.",
        type=float,
        metavar="MS",
    )
    slo: tuple[str, ...] = _setting(
        (),
        "Bounds on statistics over the online requests, all to be met at once: 'ttft p99 <= 300ms' "
        "'tpot mean <= 50ms'. Latencies are ttft, tpot (mean of a request) and tbt (every gap "
        "between tokens), statistics mean, p50, p90 and p99; '<= +10%' is over what the same "
        "requests would get without offline work. Each request is scheduled by the "
        "least of them and of the two targets above; /coserve/status shows what is reached.",
        nargs="+",
        action="extend",
        metavar="SLO",
    )
    online_slowdown: str | None = _setting(
        None,
        "How much longer than without offline work online requests may take, such as 10%: bounds "
        "P99 TTFT and the P99 of the gaps between tokens, relative to what the server predicts "
        "that the same requests would get alone. No milliseconds to choose, but not exact: see "
        "docs/policies.md. By default 10% where no target and no --offline-policy is given.",
        metavar="PERCENT",
    )
    offline_policy: str = _setting(
        _AUTO,
        "When offline requests run. fifo: first come, first served, whenever no online request "
        "waits. The others plan every step with a latency model, against --online-slowdown, "
        "--slo-ttft-ms, --slo-tpot-ms and --slo. auto: coserve.",
        choices=(_AUTO, *OFFLINE_POLICIES),
    )
    online_order: str = _setting(
        "fcfs",
        "Which waiting online request is next. fcfs: in order of arrival. vtc: that of the tenant "
        "that was served least, so that one that floods the server delays no other; a tenant is "
        "what the header x-llm-d-inference-fairness-id says, else the body's user, else the API "
        "key. For policies that plan.",
        choices=ONLINE_ORDERS,
    )
    overload: str = _setting(
        "best_effort",
        "What to do when online requests alone cannot meet their targets. best_effort: serve them "
        "all, late. shed: refuse those that can no longer meet their TTFT target, with 503 and "
        "Retry-After. For policies that plan, but for bros.",
        choices=OVERLOADS,
    )
    offline_objectives: tuple[str, ...] = _setting(
        ("batch", "best-effort", "flex", "offline"),
        "Requests with one of these in the header x-llm-d-inference-objective, which gateways set, "
        "are offline; with any other they are online.",
        nargs="+",
        metavar="NAME",
    )
    offline_utility_ratio: Annotated[float | None, _SHARE] = _setting(
        None,
        "How often the next offline request is one that shares its prompt's head with those before "
        "it, rather than the one that has waited longest: HyGen's utility ratio, from 0 to 1, 0.95 "
        "by default. For --offline-policy coserve and hygen.",
        type=float,
        metavar="SHARE",
    )
    offline_random_picks: Annotated[int | None, _NOT_NEGATIVE] = _setting(
        None,
        "How many offline decodes are drawn at random for a step that cannot hold all of them, "
        "before the shortest fill it up: K of OOCO's mix decoding selection, 8 by default. For "
        "--offline-policy ooco.",
        type=int,
        metavar="N",
    )
    offline_max_running: Annotated[int | None, _POSITIVE] = _setting(
        None,
        "Most offline requests that may run at once; by default bounded only by "
        "--max-running-requests and by memory.",
        type=int,
        metavar="N",
    )

    latency_profile: str | None = _setting(
        None,
        "Latency profile of this model on this machine, from coserve profile. Without one the "
        "server profiles briefly at start-up.",
        metavar="PROFILE.json",
    )
    startup_profile_seconds: Annotated[float, _NOT_NEGATIVE] = _setting(
        10.0,
        "How long to profile at start-up when there is no --latency-profile; 0: not at all, the "
        "model's shape and the device's peaks give a first guess. In each case every step "
        "refines the prediction.",
        type=float,
        metavar="S",
    )
    iteration_budget_ms: Annotated[float | None, _POSITIVE] = _setting(
        None,
        "Longest step, as predicted, that offline work may make, in milliseconds; coserve "
        "profile slo finds the one that just meets given SLOs. By default the deadlines of the "
        "online requests alone decide.",
        type=float,
        metavar="MS",
    )
    safepoint_interval: Annotated[int | None, _NOT_NEGATIVE] = _setting(
        None,
        "Suspend a batch of offline requests for online ones in the middle of a forward pass, "
        "before every N-th layer of the model; at most a quarter of the layers. It goes on later, "
        "and nothing is computed twice. By default 4 on a CPU, and 0 on a GPU, where it has not "
        "run yet. 0: batches always run to their end, as with --offline-policy fifo.",
        type=int,
        metavar="N",
    )
    safepoint_decode_graphs: bool = _setting(
        False,
        "On a GPU, also capture decode steps as one CUDA graph per group of layers, so that those "
        "of offline requests can be suspended too. Start-up takes longer, and graphs more memory; "
        "without it a decode step is one graph and runs to its end.",
        action="store_true",
    )
    record_plans: str | None = _setting(
        None,
        "Write every scheduling decision and what it was made from to this file, for coserve "
        "replay; numbered where it exists. Holds prompts' token ids.",
        metavar="PLANS.jsonl",
    )

    kv_checkpoint: str = _setting(
        _AUTO,
        "Keep the KV of offline requests in host memory, so that it is reclaimed for online ones "
        "at once and comes back without being computed again. eager: copy it as it is made. lazy: "
        "copy only what is reclaimed, while online requests wait. pressure: as eager, while the "
        "device's KV memory is nearly full. auto: off for now, on a CPU because the same memory "
        "does more as KV memory, on a GPU because they have not run there yet.",
        choices=(_AUTO, *(mode.value for mode in CheckpointMode)),
    )
    kv_checkpoint_host_gb: Annotated[float | None, _POSITIVE] = _setting(
        None,
        "Host memory for KV, in GB for each GPU; by default twice the device's KV memory.",
        type=float,
        metavar="GB",
    )
    kv_checkpoint_offline_share: Annotated[float, _SHARE] = _setting(
        1.0,
        "Part of that memory that offline requests may use.",
        type=float,
        metavar="SHARE",
    )
    kv_checkpoint_online_share: Annotated[float, _SHARE] = _setting(
        0.0,
        "Part of that memory for cached prefixes of online requests; together with "
        "--kv-checkpoint-offline-share at most 1.",
        type=float,
        metavar="SHARE",
    )
    kv_checkpoint_watermark: Annotated[float, _SHARE] = _setting(
        0.8,
        "Part of the device's KV memory in use above which --kv-checkpoint pressure copies.",
        type=float,
        metavar="SHARE",
    )
    kv_move_dir: str | None = _setting(
        None,
        "Directory, the same one for several engines, through which the KV of a line goes with it "
        "from an engine that gives it back (a drain) to the one that goes on. Nobody but the "
        "user that the engines run as may read it. By default only tokens go, and their KV is "
        "computed again.",
        metavar="DIRECTORY",
    )

    media_sources: str = _setting(
        "public",
        "Where images, videos and sounds of requests and of lines of batches may come from. "
        "inline: the request itself, as base64 or a data: URL. public: http(s) addresses in the "
        "internet, too. any: whatever SGLang opens, private addresses and files of this machine "
        "among it.",
        choices=MEDIA_SOURCES,
    )

    open_view: bool = _setting(
        False,
        "Let everybody who reaches the port look at /coserve without a key: at the engine's "
        "figures, at no batches, and without buttons. Otherwise the page asks for --api-key or "
        "--admin-api-key where --api-key is set.",
        action="store_true",
    )

    def __post_init__(self) -> None:
        for name in ("slo", "offline_objectives"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # argparse makes a list.
        BatchApiConfig.__post_init__(self)
        for text in self.slo:
            _slo(text)
        if self.online_slowdown is not None:
            _slowdown(self.online_slowdown)
        if self.offline_policy == _AUTO:
            object.__setattr__(self, "offline_policy", "coserve")
            if not self.slos():
                object.__setattr__(self, "online_slowdown", _SLOWDOWN)
        _check_kv_checkpoint(self)
        self._refuse_flags_without_effect()

    def _refuse_flags_without_effect(self) -> None:
        """Refuse what would change nothing."""
        changed = _changed(self)
        for name in FIELDS_WITHOUT_EFFECT[self.offline_policy]:
            if name in changed:
                raise ConfigError(
                    f"{_flag(name)} has no effect with --offline-policy {self.offline_policy}: "
                    "leave it out, or choose another policy"
                )
        if self.offline_policy == "fifo" and any(slo.limit_s is None for slo in self.slos()):
            raise ConfigError(
                f"{_flag('slo')}: a target relative to online requests alone has no effect with "
                "--offline-policy fifo, which predicts nothing: choose another policy"
            )

    @property
    def checkpoint_mode(self) -> CheckpointMode:
        """When KV is copied to the host. ``auto`` takes nothing of it unasked on any machine yet:
        docs/kv_checkpoint.md says what decided that."""
        is_auto = self.kv_checkpoint == _AUTO
        return CheckpointMode.OFF if is_auto else CheckpointMode(self.kv_checkpoint)

    @property
    def ignores_targets(self) -> bool:
        """True when plans look at no targets, so that requests cannot bring their own.

        Under fifo there are no plans: there a target says by what a request is judged.
        """
        return self.offline_policy == "non_preemptive" and self.overload != Overload.SHED.value

    @property
    def plans_online(self) -> bool:
        """True when online requests are ordered or refused by plans, also without offline ones."""
        return self.online_order != OnlineOrder.FCFS.value or self.overload == Overload.SHED.value

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

    def slo_targets(self) -> SloTargets:
        """Return the deadlines of a request that has none of its own, as far as they are fixed."""
        return request_targets([slo for slo in self.slos() if slo.limit_s is not None])


def _changed(config: BatchApiConfig) -> set[str]:
    """Return the names of the settings that are not what they are by default."""
    return {
        field.name
        for field in dataclasses.fields(config)
        if (value := getattr(config, field.name)) != field.default
        and not (value == 0 and field.name in _OFF_AT_ZERO)
    }


def _check(field: dataclasses.Field[Any], value: object) -> None:
    """Refuse a value that is out of the field's range, or none of its choices."""
    if field.name in _RANGES:
        try:
            _RANGES[field.name].validate_python(value)
        except ValidationError as error:
            raise ConfigError(f"{_flag(field.name)} {explain(error)}") from error
    choices = field.metadata["cli"].get("choices")
    if choices is not None and value not in choices:
        raise ConfigError(f"{_flag(field.name)} must be one of {', '.join(choices)}, got {value!r}")


def _check_kv_checkpoint(config: CoserveConfig) -> None:
    if config.kv_checkpoint_offline_share + config.kv_checkpoint_online_share > 1:
        raise ConfigError(
            f"{_flag('kv_checkpoint_offline_share')} and {_flag('kv_checkpoint_online_share')} "
            "are parts of one memory: together they must not exceed 1"
        )
    for field in dataclasses.fields(config):
        if field.name in _CHECKPOINT_MODES and getattr(config, field.name) != field.default:
            useful = _CHECKPOINT_MODES[field.name]
            if config.kv_checkpoint not in useful:
                raise ConfigError(
                    f"{_flag(field.name)} has no effect with {_flag('kv_checkpoint')} "
                    f"{config.kv_checkpoint}: leave it out, or choose {' or '.join(useful)}"
                )


_RANGES: Mapping[str, TypeAdapter[Any]] = MappingProxyType(
    {
        name: TypeAdapter(kind, config=STRICT)
        for name, kind in get_type_hints(CoserveConfig, include_extras=True).items()
        if get_origin(kind) is Annotated
    }
)


def _flag(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def _slo(text: str) -> Slo:
    try:
        return parse_slo(text)
    except ConfigError as error:
        raise ConfigError(f"{_flag('slo')}: {error}") from error


def _slowdown(text: str) -> float:
    """Return a percentage as a fraction."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*%", text.strip(), re.ASCII)
    if match is None:
        raise ConfigError(
            f"{_flag('online_slowdown')} must be a percentage such as 10%, got {text!r}"
        )
    return float(match[1]) / 100
