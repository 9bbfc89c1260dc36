"""The safepoints of one scheduler: puts them into its model if the engine supports them, arms and
disarms batches of the offline lane, and counts."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.model_executor.model_runner import ModelRunnerOutput

from sglang_coserve.config import FIELDS_WITHOUT_EFFECT, CoserveConfig
from sglang_coserve.core.snapshot import RequestInfo
from sglang_coserve.srt import compat
from sglang_coserve.srt.forward_kind import ForwardKind, kind_of, num_decodes, runs_beside_host
from sglang_coserve.srt.safepoint.gates import (
    FollowerGate,
    LeaderGate,
    batch_id,
    device_events,
    has_ordered_stores,
    share_words,
)
from sglang_coserve.srt.safepoint.graph_cuts import GraphCuts
from sglang_coserve.srt.safepoint.inbox import Inbox
from sglang_coserve.srt.safepoint.instrument import (
    Gate,
    Resumption,
    Stops,
    decoder_layers,
    fitting_interval,
)
from sglang_coserve.srt.safepoint.placement import cut_graphs, why_prefills_cannot_stop

_SAMPLES: Final = 1024
_PERCENTILES: Final = (50, 90, 99)

_DELAYS: Final = ("arrival_to_stop", "stop_to_first_token", "arrival_to_first_token")


class SafepointStats:
    """Counts suspensions, and measures the delays from an arrival to its first token.

    Delays are in seconds, of the last thousand steps that were suspended for an arrival. An
    arrival counts from when the server received the request.
    """

    def __init__(self) -> None:
        self.suspensions: Counter[ForwardKind] = Counter()
        self.resumed = 0
        self.ran_to_end: Counter[str] = Counter()
        """Steps of the offline lane that had to run to their end, by reason."""

        self._delays: dict[str, deque[float]] = {name: deque(maxlen=_SAMPLES) for name in _DELAYS}
        self._awaited: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Arrivals for which a step was suspended, with the times of arrival and suspension; the
        last ones, as some are refused before they become requests."""

    def suspended(self, kind: ForwardKind, arrivals: Sequence[RequestInfo], now_s: float) -> None:
        """Record that a step was suspended; ``now_s`` is ``time.perf_counter``.

        ``arrivals`` are who it was suspended for: nobody at its deadline, and on ranks that do not
        receive requests.
        """
        self.suspensions[kind] += 1
        if not arrivals:
            return
        first_s = min(arrival.arrival_s for arrival in arrivals)
        self._delays["arrival_to_stop"].append(now_s - first_s)
        for arrival in arrivals:
            self._awaited.setdefault(arrival.rid, (arrival.arrival_s, now_s))
        while len(self._awaited) > _SAMPLES:
            self._awaited.popitem(last=False)

    def first_token(self, rid: str, at_s: float) -> None:
        """Record that a request got its first token at ``at_s``. O(1)."""
        if (times := self._awaited.pop(rid, None)) is not None:
            arrival_s, stopped_s = times
            self._delays["stop_to_first_token"].append(at_s - stopped_s)
            self._delays["arrival_to_first_token"].append(at_s - arrival_s)

    def forget(self, rid: str) -> None:
        """Discard a pending arrival that has ended."""
        self._awaited.pop(rid, None)

    def report(self) -> dict[str, Any]:
        """Return all statistics as plain values."""
        return {
            "suspended": {kind.value: self.suspensions[kind] for kind in ForwardKind},
            "resumed": self.resumed,
            "kept": dict(self.ran_to_end),
            "delays_ms": {name: _summary(values) for name, values in self._delays.items()},
        }


def _summary(values: deque[float]) -> Mapping[str, float | int | None]:
    if not values:
        return {"n": 0, **{f"p{q}": None for q in _PERCENTILES}}
    points = np.percentile(np.array(values) * 1e3, _PERCENTILES).tolist()
    names = (f"p{q}" for q in _PERCENTILES)
    return {"n": len(values), **dict(zip(names, points, strict=True))}


ScheduleBatch = Any


def why_batch_must_end(batch: ScheduleBatch, num_prefills: int) -> str | None:
    """Return why this batch cannot be suspended; None if it can. O(requests)."""
    if batch.hicache_consumer_index != -1:
        return "KV is being loaded from the host layer by layer"
    for place, req in enumerate(batch.reqs):
        if req.session is not None:
            return "a session shares its KV"
        if place < num_prefills and req.multimodal_inputs is not None:
            return "images are dropped once they are embedded"
        if place < num_prefills and req.input_embeds is not None:
            return "embeddings are given instead of tokens"
    return None


_NONE: Final[Mapping[ForwardKind, str]] = MappingProxyType({})


class Safepoints:
    """Arms batches of the offline lane, and counts those that were suspended.

    All ranks arm the same batches; the rank that receives requests decides when they stop. An
    engine without safepoints has one of these, too (``none``), and arms nothing.
    """

    def __init__(
        self,
        gate: Gate,
        resumption: Resumption,
        *,
        num_layers: int,
        interval: int,
        outstanding_groups: int = 1,
        no_safepoints: Mapping[ForwardKind, str] = _NONE,
        inbox: Inbox | None = None,
    ) -> None:
        """At most ``outstanding_groups`` groups of layers still run after a stop was requested.

        ``no_safepoints`` are the kinds of batches without safepoints, each with the reason;
        ``inbox`` receives requests, on the rank that does.
        """
        self.stats = SafepointStats()
        self.gate = gate
        self.resumption = resumption
        self.num_layers = num_layers
        self.inbox = inbox
        self.are_there = True
        self.stop_share = min(1.0, outstanding_groups * interval / num_layers)
        """Largest share of a batch that still runs after a stop was requested."""

        self._why_not: str | None = None
        self._no_safepoints = no_safepoints
        self._interval = interval

    @classmethod
    def none(cls, why_not: str | None = None) -> Safepoints:
        """Return those of an engine without any; ``why_not`` says why, if some were asked for."""
        gate = LeaderGate(list)
        nowhere = cls(gate, Resumption([], 1, gate), num_layers=1, interval=1)
        nowhere.are_there, nowhere._why_not = False, why_not
        return nowhere

    @property
    def decodes_stop(self) -> bool:
        """Whether batches of decodes can be suspended, too; if not they run to their end."""
        return ForwardKind.DECODE not in self._no_safepoints

    def why_it_must_end(self, batch: ScheduleBatch) -> str | None:
        """Return why a batch cannot stop at a safepoint; None if it can. O(requests)."""
        kind = kind_of(batch)
        if kind is None:
            return "neither a prefill nor a decode"
        if kind in self._no_safepoints:
            return self._no_safepoints[kind]
        return why_batch_must_end(batch, len(batch.reqs) - num_decodes(batch, kind))

    @contextmanager
    def armed(self, forward_count: int, stops: Stops) -> Iterator[None]:
        """Let a pass in this context be stopped; it then raises ``ForwardPreempted``.

        ``forward_count`` identifies the batch.
        """
        self.gate.arm(batch_id(forward_count), stops)
        try:
            yield
        finally:
            self.gate.disarm()

    def state(self) -> dict[str, Any]:
        """Return what the status says of safepoints; empty if none were asked for."""
        if not self.are_there:
            why_not = self._why_not
            return {"safepoints": {"enabled": False, "reason": why_not}} if why_not else {}
        settings = {"interval_layers": self._interval, "layers": self.num_layers}
        return {"safepoints": {"enabled": True, **settings, **self.stats.report()}}


Scheduler = Any

_MADE_AT_THE_END: Final = frozenset(("enable_return_hidden_states",))
"""Settings of outputs that SGLang makes of what the last layer returns.

SGLang gathers all other outputs layer by layer: in buffers that other passes overwrite while a pass
is suspended, or in lists that a resumed pass begins anew."""

_PASS_OUTPUTS: Final = frozenset(
    (
        "logits_output",
        "can_run_graph",
        # Gathered layer by layer: with settings that exclude safepoints.
        "expert_distribution_metrics",
        "routed_experts_output",
        "indexer_topk_output",
    )
)
"""The outputs of a pass of SGLang's (``ModelRunnerOutput``) that were looked at."""


def _gathered_outputs(server_args: Any, settings: Any) -> list[str]:
    """Return the names of SGLang's outputs that a suspended pass would get wrong, or might."""
    flags = [name for name in dir(server_args) if name.startswith("enable_return_")]
    is_set = [
        "--" + name.replace("_", "-")
        for name in flags
        if name not in _MADE_AT_THE_END and getattr(settings, name)
    ]
    return is_set + sorted({field.name for field in fields(ModelRunnerOutput)} - _PASS_OUTPUTS)


def why_no_safepoints(scheduler: Scheduler, layers: Sequence[Any]) -> str | None:
    """Return why this engine's batches cannot be suspended; None if they can.

    ``layers`` are the decoder layers that were found in the model.
    """
    args, ps = compat.settings_of(scheduler.server_args), compat.parallel(scheduler)
    gathered = _gathered_outputs(scheduler.server_args, args)
    reasons = {
        f"no safepoints for the device {scheduler.device}": scheduler.device not in ("cpu", "cuda"),
        "unified memory moves KV by what it knows of the pass in flight": (
            scheduler.device == "cuda" and scheduler.enable_unified_memory
        ),
        "--enable-torch-compile runs a CPU's decode steps as one piece": (
            scheduler.device == "cpu" and args.enable_torch_compile
        ),
        "the model does not generate": not scheduler.is_generation,
        "no list of decoder layers was found in the model": not layers,
        "--enable-linear-replayssm moves the states of layers on before each pass": (
            _has_replayed_states(scheduler.req_to_token_pool)
        ),
        "encoder-decoder models are not supported": scheduler.model_config.is_encoder_decoder,
        "pipeline parallelism": ps.pp_size > 1,
        "context parallelism": ps.attn_cp_size > 1,
        "tensor parallelism over several machines": ps.tp_size > 1 and args.nnodes > 1,
        "tensor parallelism on a processor that reorders stores": (
            ps.tp_size > 1 and not has_ordered_stores()
        ),
        "--enable-two-batch-overlap runs layers in its own order": args.enable_two_batch_overlap,
        "the statistics of experts would count a pass for each of its parts": (
            args.enable_eplb or args.expert_distribution_recorder_mode is not None
        ),
        f"outputs are gathered layer by layer: {', '.join(gathered)}": bool(gathered),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _has_replayed_states(pool: Any) -> bool:
    is_hybrid = isinstance(pool, HybridReqToTokenPool)
    return is_hybrid and pool.mamba_pool.replayssm_write_pos is not None


_LONGEST_SLEEP_S: Final = {"cpu": 1e-3, "cuda": 2e-4}
"""Longest sleep of a rank that waits for rank 0; shorter for a GPU, which idles meanwhile and
computes layers faster."""

_INTERVAL: Final = 4
"""Layers between two safepoints, as in ConServe §6.5, unless the user says otherwise."""

logger = logging.getLogger(__name__)

_RUN_AHEAD: Final = 1
"""Groups of layers that the host may launch ahead of the one that the GPU computes."""


def install_safepoints(scheduler: Any, config: CoserveConfig) -> Safepoints:
    """Install safepoints in the model, if the settings request them; every rank must call it.

    Raises:
        RuntimeError: CUDA graphs could not be captured again.
    """
    is_used = "safepoint_interval" not in FIELDS_WITHOUT_EFFECT[config.offline_policy]
    if not is_used or config.safepoint_interval == 0:
        return Safepoints.none()
    runner = scheduler.tp_worker.model_runner
    layers = decoder_layers(runner.model)
    reason = why_no_safepoints(scheduler, layers)
    is_cuda = scheduler.device == "cuda"
    run_ahead = _RUN_AHEAD if runs_beside_host(scheduler.device) else 0
    if reason is None and is_cuda:
        if config.safepoint_interval is None:
            reason = "on a GPU, where outputs were not compared yet, only with --safepoint-interval"
        else:
            reason = why_prefills_cannot_stop(runner)
    if reason is not None:
        if compat.is_first_rank(scheduler):
            logger.warning("no safepoints, offline batches run to their end: %s", reason)
        return Safepoints.none(reason)
    socket = scheduler.recv_from_tokenizer
    inbox = None if socket is None else Inbox(socket)
    gate = _make_gate(scheduler, inbox, run_ahead)
    interval = fitting_interval(config.safepoint_interval or _INTERVAL, len(layers))
    # On a GPU for passes without graphs: a prefill may be longer than the captured ones.
    resumption = Resumption(layers, interval, gate)
    no_safepoints = _NONE
    if is_cuda:
        cuts = partial(GraphCuts, layers, interval, gate, resumption)
        no_safepoints = cut_graphs(runner, cuts, groups_decodes=config.safepoint_decode_graphs)
    return Safepoints(
        gate,
        resumption,
        num_layers=len(layers),
        interval=interval,
        outstanding_groups=1 + run_ahead,
        no_safepoints=no_safepoints,
        inbox=inbox,
    )


def _make_gate(scheduler: Any, inbox: Inbox | None, run_ahead: int) -> Gate:
    ps = compat.parallel(scheduler)
    words = share_words(scheduler.tp_cpu_group, ps.tp_rank) if ps.tp_size > 1 else None
    if words is not None and ps.tp_rank > 0:
        # They wait for rank 0, and so for its GPU.
        longest_sleep_s = _LONGEST_SLEEP_S[scheduler.device]
        return FollowerGate(words, ps.tp_rank, longest_sleep_s=longest_sleep_s)
    assert inbox is not None, "rank 0 receives the requests"
    events = device_events(scheduler.device, run_ahead) if run_ahead else ()
    return LeaderGate(inbox.arrivals, events, None if words is None else words.publish)
