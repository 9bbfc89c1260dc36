"""What has changed with SGLang 0.5.21: ranks are the process's, and pools make prefill budgets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = [
    "exceeds_window_pool",
    "is_mixed",
    "parallel",
    "reserve_window_slots",
    "start_scheduler",
]

Req = Any


def is_mixed(adder: Any) -> bool:
    """As in ``v17``."""
    return bool(adder.memory_budget.current_offset > 0)


def reserve_window_slots(adder: Any, tokens: int) -> None:
    """As in ``v17``."""
    adder.memory_budget.swa_offset += tokens


def exceeds_window_pool(adder: Any, req: Req, tokens: int) -> bool:
    """As in ``v17``; SGLang shortens a chunk only where the pool would never suffice."""
    budget = adder.memory_budget
    needed = budget.swa_tokens(
        tokens, adder._swa_new_tokens(req), chunk_limit=adder.rem_chunk_tokens
    )
    return bool(needed >= budget.remaining_swa)


def parallel(scheduler: Any) -> Any:  # noqa: ARG001
    """As in ``v17``."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def start_scheduler(
    kind: Callable[..., Any], server_args: Any, port_args: Any, tp_rank: int, *, configures: bool
) -> Any:
    """As in ``v17``."""
    from sglang.srt.managers.scheduler import configure_scheduler_process
    from sglang.srt.runtime_context import SpawnRanks, publish

    gpu_id = server_args.base_gpu_id + tp_rank * server_args.gpu_id_step
    # Without pipeline parallelism, which is refused.
    ranks = SpawnRanks(world_rank=tp_rank, dp_rank=None, gpu_id=gpu_id)
    publish(server_args, role="scheduler", ranks=ranks)
    if configures:
        configure_scheduler_process(server_args, gpu_id)
    return kind(server_args, port_args)
