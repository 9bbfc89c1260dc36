"""What has changed with SGLang 0.5.20: ranks follow from settings that are published before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["start_scheduler"]


def start_scheduler(
    kind: Callable[..., Any], server_args: Any, port_args: Any, tp_rank: int, *, configures: bool
) -> Any:
    """As in ``v17``."""
    from sglang.srt.entrypoints.engine import _compute_parallelism_ranks
    from sglang.srt.managers.scheduler import configure_scheduler_process
    from sglang.srt.runtime_context import publish

    publish(server_args, role="scheduler")
    gpu_id = server_args.base_gpu_id + tp_rank * server_args.gpu_id_step
    cp_rank, moe_dp_rank, moe_ep_rank = _compute_parallelism_ranks(tp_rank)
    pp_rank, dp_rank = 0, None
    if configures:
        dp_rank = configure_scheduler_process(
            server_args, gpu_id, tp_rank, cp_rank, moe_dp_rank, moe_ep_rank, pp_rank, dp_rank
        )
    return kind(
        server_args,
        port_args,
        gpu_id,
        tp_rank,
        moe_ep_rank,
        pp_rank,
        cp_rank,
        moe_dp_rank,
        dp_rank,
    )
