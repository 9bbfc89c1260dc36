"""Puts safepoints into a scheduler's model, where they can work."""

from __future__ import annotations

import logging
from typing import Any

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.preemption_guard import GuardConfig
from sglang_coserve.srt.safepoint.arrival_watch import ArrivalWatch
from sglang_coserve.srt.safepoint.consensus import FollowerGate, LeaderGate, share_words
from sglang_coserve.srt.safepoint.eligibility import why_no_safepoints
from sglang_coserve.srt.safepoint.flag import PreemptionFlag
from sglang_coserve.srt.safepoint.inbox import Inbox
from sglang_coserve.srt.safepoint.ingress import Ingress
from sglang_coserve.srt.safepoint.instrument import Gate, add_safepoints, fitting_interval
from sglang_coserve.srt.safepoint.layers import decoder_layers
from sglang_coserve.srt.safepoint.local_gate import LocalGate
from sglang_coserve.srt.safepoint.safepoints import Safepoints

__all__ = ["install_safepoints"]

logger = logging.getLogger(__name__)


def install_safepoints(
    scheduler: Any, config: CoserveConfig
) -> tuple[Safepoints | None, Ingress | None, str | None]:
    """Put safepoints into the model; every rank must call it.

    Returns the safepoints, what receives requests on the rank that does, and why
    there are none if there are none.
    """
    layers = decoder_layers(scheduler.tp_worker.model_runner.model)
    reason = why_no_safepoints(scheduler, layers)
    ps = scheduler.ps
    if reason is not None:
        if ps.tp_rank == 0:
            logger.warning("no safepoints, offline batches run to their end: %s", reason)
        return None, None, reason
    flag = PreemptionFlag(pinned=scheduler.device == "cuda")
    gate: Gate
    if ps.tp_size == 1:
        gate = LocalGate(flag)
    else:
        words = share_words(scheduler.tp_cpu_group, ps.tp_rank)
        gate = LeaderGate(words, flag) if ps.tp_rank == 0 else FollowerGate(words)
    interval = fitting_interval(config.safepoint_interval, len(layers))
    add_safepoints(layers, interval, gate)
    watch = ingress = None
    if scheduler.recv_from_tokenizer is not None:
        inbox = Inbox()
        watch = ArrivalWatch(inbox, flag, config.slo_targets().ttft_s)
        channels = scheduler.ipc_channels
        ingress = Ingress(channels.recv_from_tokenizer, channels.recv_from_rpc, inbox, watch)
    guard = GuardConfig(wasted_share=config.safepoint_wasted_share)
    safepoints = Safepoints(gate, watch, guard, num_layers=len(layers), interval=interval)
    return safepoints, ingress, None
