"""Decides which engines and batches can be suspended and dropped; others run to their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

from sglang_coserve.srt import compat
from sglang_coserve.srt.safepoint.consensus import has_ordered_stores

__all__ = ["why_batch_must_end", "why_no_safepoints"]

ScheduleBatch = Any
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
        "speculative decoding": not scheduler.spec_algorithm.is_none(),
        "pipeline parallelism": ps.pp_size > 1,
        "DP attention": args.enable_dp_attention,
        "context parallelism": ps.attn_cp_size > 1,
        "tensor parallelism over several machines": ps.tp_size > 1 and args.nnodes > 1,
        "tensor parallelism on a processor that reorders stores": (
            ps.tp_size > 1 and not has_ordered_stores()
        ),
        "--enable-two-batch-overlap runs layers in its own order": args.enable_two_batch_overlap,
        "--enable-pdmux runs layers in its own order": args.enable_pdmux,
        "the statistics of experts would count a pass for each of its parts": (
            args.enable_eplb or args.expert_distribution_recorder_mode is not None
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _has_replayed_states(pool: Any) -> bool:
    is_hybrid = isinstance(pool, HybridReqToTokenPool)
    return is_hybrid and pool.mamba_pool.replayssm_write_pos is not None


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
