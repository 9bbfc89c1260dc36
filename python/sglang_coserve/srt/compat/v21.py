"""What has changed with SGLang 0.5.21: ranks are the process's, pools make prefill budgets, layers
hand the residual on in a stream of the batch's, logit processors have lists of rows of logits, and
a release of KV is not the radix cache's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sglang_coserve.errors import StartupError
from sglang_coserve.srt.compat import v17
from sglang_coserve.srt.compat.v18 import submit_load
from sglang_coserve.srt.compat.v19 import protected_tokens

__all__ = [
    "cached_tokens_of",
    "complete_arguments",
    "exceeds_window_pool",
    "inserting_cache",
    "is_mixed",
    "keep_outputs",
    "logit_processors",
    "parallel",
    "put_back_outputs",
    "reserve_window_slots",
    "start_load",
    "start_scheduler",
    "tensors_beside",
]

Req = Any


def cached_tokens_of(tree_cache: Any, reqs: Sequence[Req], besides: Sequence[Req]) -> int:
    """As in ``v17``. A tree in Rust shows no nodes: what requests share counts for each."""
    try:
        return v17.cached_tokens_of(tree_cache, reqs, besides)
    except NotImplementedError:
        return sum(protected_tokens(req) for req in reqs)


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


def logit_processors(sampling_info: Any) -> Iterator[tuple[Any, list[int], Any]]:
    """As in ``v17``."""
    for entry in sampling_info.custom_logit_processor.values():
        yield entry.processor, entry.rows, entry.indices


def keep_outputs(outputs: Any, arguments: Sequence[Any]) -> Any:
    """As in ``v17``. A sum over ranks that is still owed is made: its parts may lie in memory that
    other passes use."""
    from sglang.srt.layers.layer_boundary.residual.batch import complete_output

    batch = _forward_batch(arguments)
    stream = batch and batch.residual_stream
    if stream is None:
        return outputs, None
    if stream.pending is not None and stream.pending.owed is not None:
        outputs = complete_output(outputs, batch)
    batch.residual_stream = None  # Some models clear it when a pass ends early.
    return outputs, stream


def put_back_outputs(kept: Any, arguments: Sequence[Any]) -> Any:
    """As in ``v17``."""
    outputs, stream = kept
    if stream is not None:
        _forward_batch(arguments).residual_stream = stream
    return outputs


def complete_arguments(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """As in ``v17``. What a layer with experts left to the next one to finish is finished here: its
    parts are no tensors of ours."""
    from sglang.srt.layers.layer_boundary.residual.batch import complete_output
    from sglang.srt.layers.layer_boundary.residual.stream import OwedOutput

    batch = _forward_batch(arguments)
    stream = batch and batch.residual_stream
    if stream is None:
        return tuple(arguments)
    if stream.transport is not None:
        raise StartupError(
            "the model's layers hand on rows that a CUDA graph cannot keep at a cut: start without "
            "--safepoint-interval"
        )
    if stream.pending is None or stream.pending.value is not None:
        return tuple(arguments)
    return tuple(
        complete_output(each, batch) if isinstance(each, OwedOutput) else each for each in arguments
    )


def tensors_beside(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """As in ``v17``."""
    batch = _forward_batch(arguments)
    stream = batch and batch.residual_stream
    if stream is None:
        return ()
    pending = stream.pending and stream.pending.value
    return tuple(each for each in (stream.residual, pending) if each is not None)


def _forward_batch(arguments: Sequence[Any]) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    return next((each for each in arguments if isinstance(each, ForwardBatch)), None)


def start_load(controller: Any, host_slots: Any, device_slots: Any, load_id: int) -> None:
    """As in ``v17``."""
    last = controller.transfer_layer_id_max
    submit_load(controller, host_slots, device_slots, load_id, transfer_layer_id_max=last)


def inserting_cache(kind: type) -> type:
    """As in ``v17``."""

    class InsertingCache(kind):
        def cache_unfinished_req(self, req: Req, chunked: bool = False, **kwargs: Any) -> None:
            with self.inserting(req):
                super().cache_unfinished_req(req, chunked, **kwargs)

        def insert_req(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
            with self.inserting(req):
                super().insert_req(req, up_to=up_to, **kwargs)

        def on_release(self, req: Req, *, inserted: bool) -> None:
            super().on_release(req, inserted=inserted)
            self.released(req, req.owned_kv_len() if inserted else None)

    return InsertingCache


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
