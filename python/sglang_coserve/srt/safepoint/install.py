"""Installs safepoints in a scheduler's model, if the engine supports them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

from sglang_coserve.config import FIELDS_WITHOUT_EFFECT, CoserveConfig
from sglang_coserve.srt import compat
from sglang_coserve.srt.forward_kind import runs_beside_host
from sglang_coserve.srt.safepoint.gates import (
    FollowerGate,
    LeaderGate,
    PreemptionFlag,
    device_events,
    has_ordered_stores,
    share_words,
)
from sglang_coserve.srt.safepoint.ingress import ArrivalWatch, Inbox, Ingress
from sglang_coserve.srt.safepoint.instrument import (
    Gate,
    Resumption,
    add_safepoints,
    decoder_layers,
    fitting_interval,
)
from sglang_coserve.srt.safepoint.placement import (
    RUN_AHEAD,
    SafepointPlacement,
    place_on_cuda,
    why_prefills_cannot_stop,
)
from sglang_coserve.srt.safepoint.safepoints import Safepoints

Scheduler = Any


def why_no_safepoints(scheduler: Scheduler, layers: Sequence[Any]) -> str | None:
    """Return why this engine's batches cannot be suspended; None if they can.

    ``layers`` are the decoder layers that were found in the model.
    """
    args, ps = compat.settings_of(scheduler.server_args), compat.parallel(scheduler)
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


@dataclass(frozen=True, slots=True)
class Installed:
    """The result of ``install_safepoints``."""

    safepoints: Safepoints | None = None
    ingress: Ingress | None = None
    """Receives requests; None on the ranks that do not, and without safepoints."""

    why_not: str | None = None
    """Why there are no safepoints; None if there are some, or none were requested."""


def install_safepoints(scheduler: Any, config: CoserveConfig) -> Installed:
    """Install safepoints in the model, if the settings request them; every rank must call it.

    Raises:
        RuntimeError: CUDA graphs could not be captured again.
    """
    is_used = "safepoint_interval" not in FIELDS_WITHOUT_EFFECT[config.offline_policy]
    if not is_used or config.safepoint_interval == 0:
        return Installed()
    layers = decoder_layers(scheduler.tp_worker.model_runner.model)
    reason = why_no_safepoints(scheduler, layers)
    is_cuda = scheduler.device == "cuda"
    run_ahead = RUN_AHEAD if runs_beside_host(scheduler.device) else 0
    if reason is None and is_cuda:
        if config.safepoint_interval is None:
            reason = "on a GPU, where outputs were not compared yet, only with --safepoint-interval"
        else:
            reason = why_prefills_cannot_stop(scheduler.tp_worker.model_runner)
    if reason is not None:
        if compat.is_first_rank(scheduler):
            logger.warning("no safepoints, offline batches run to their end: %s", reason)
        return Installed(why_not=reason)
    flag = PreemptionFlag(pinned=is_cuda)
    gate = _make_gate(scheduler, flag, run_ahead)
    interval = fitting_interval(config.safepoint_interval or _INTERVAL, len(layers))
    if is_cuda:
        groups_decodes = config.safepoint_decode_graphs
        placement = place_on_cuda(scheduler, layers, interval, gate, groups_decodes=groups_decodes)
    else:
        add_safepoints(layers, interval, gate)
        placement = SafepointPlacement(gate, Resumption(layers), 1 + run_ahead)
    watch = ingress = None
    if scheduler.recv_from_tokenizer is not None:
        inbox = Inbox()
        watch = ArrivalWatch(inbox, flag)
        channels = scheduler.ipc_channels
        ingress = Ingress(channels.recv_from_tokenizer, channels.recv_from_rpc, inbox, watch)
    safepoints = Safepoints(placement, watch, num_layers=len(layers), interval=interval)
    return Installed(safepoints, ingress)


def _make_gate(scheduler: Any, flag: PreemptionFlag, run_ahead: int) -> Gate:
    ps = compat.parallel(scheduler)
    words = share_words(scheduler.tp_cpu_group, ps.tp_rank) if ps.tp_size > 1 else None
    if words is not None and ps.tp_rank > 0:
        # They wait for rank 0, and so for its GPU.
        return FollowerGate(words, longest_sleep_s=_LONGEST_SLEEP_S[scheduler.device])
    events = device_events(scheduler.device, run_ahead) if run_ahead else ()
    return LeaderGate(flag, events, None if words is None else words.publish)
