"""SGLang 0.5.17: what ``v23`` says of each function, where nothing else is said here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_coserve.replacements import replace

if TYPE_CHECKING:
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

Req = Any
ScheduleBatch = Any

# --- Settings ------------------------------------------------------------------------------


def settings_of(server_args: Any) -> Any:
    """As in ``v23``; they are in effect as soon as they are made."""
    return server_args


def model_config_of(server_args: Any) -> Any:
    return server_args.get_model_config()


def log_settings_through(told: Callable[[Mapping[str, Any]], Any]) -> None:
    from sglang.srt.server_args import ServerArgs

    ServerArgs.__repr__ = lambda args: f"ServerArgs({told(vars(args))})"


def own_number_settings() -> tuple[str, ...]:
    return ("torchao_config",)


# --- What a request holds ------------------------------------------------------------------


def holds_kv(req: Req) -> bool:
    return req.kv is not None


def slot_of(req: Req) -> Any:
    return req.req_pool_idx


def computed_tokens(req: Req) -> int:
    return int(req.kv_committed_len)


def set_computed_tokens(req: Req, tokens: int) -> None:
    req.kv_committed_len = tokens


def protected_tokens(req: Req) -> int:
    return int(req.cache_protected_len)


# --- What a request computes next ----------------------------------------------------------


def prefix_tokens(req: Req) -> int:
    return len(req.prefix_indices)


def new_tokens(req: Req) -> int:
    return int(req.extend_range.length)


def cached_prefix_tokens(tree_cache: Any, req: Req) -> int:
    """As in ``v23``, but every cache is matched."""
    req.init_next_round_input(tree_cache, cow_mamba=False)
    return prefix_tokens(req)


def set_extent(req: Req, begin: int, end: int) -> None:
    req.set_extend_range(begin, end)


def has_unsaved_kv(req: Req) -> bool:
    return bool(req.extend_range.end > len(req.prefix_indices))


def place_context(req: Req, slots: Any, scheduler: Any) -> None:  # noqa: ARG001
    req.prefix_indices = slots


def free_prepared(req: Req, scheduler: Any) -> None:
    if slot_of(req) is None:
        scheduler.token_to_kv_pool_allocator.free(req.prefix_indices)
    else:
        release_kv(req, scheduler.tree_cache, keeps=False)


def release_kv(req: Req, tree_cache: Any, *, keeps: bool) -> None:
    """As in ``v23``, of every cache."""
    from sglang.srt.mem_cache.common import release_kv_cache

    release_kv_cache(req, tree_cache, is_insert=keeps)


def filter_out(batch: ScheduleBatch, reqs: Sequence[Req]) -> None:
    batch.filter_batch(chunked_req_to_exclude=list(reqs))


# --- The admission of prefills into a sliding window's pool ----------------------------------


def is_mixed(adder: Any) -> bool:
    return bool(adder.cur_rem_token_offset > 0)


def reserve_window_slots(adder: Any, tokens: int) -> None:
    adder.rem_swa_token_offset += tokens


def exceeds_window_pool(adder: Any, req: Req, tokens: int) -> bool:
    needed = adder._swa_budget_for_req(tokens, adder._swa_new_tokens(req))
    return bool(needed >= adder.rem_swa_tokens)


# --- Custom logit processors -----------------------------------------------------------------


def logit_processors(sampling_info: Any) -> Iterator[tuple[Any, list[int], Any]]:
    for processor, is_of_row in sampling_info.custom_logit_processor.values():
        indices = is_of_row.nonzero().view(-1)
        yield processor, indices.tolist(), indices


# --- What layers hand on: all of it is in their outputs ----------------------------------------


def keep_outputs(outputs: Any, arguments: Sequence[Any]) -> Any:  # noqa: ARG001
    return outputs


def put_back_outputs(kept: Any, arguments: Sequence[Any]) -> Any:  # noqa: ARG001
    return kept


def complete_arguments(arguments: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(arguments)


def tensors_beside(arguments: Sequence[Any]) -> tuple[Any, ...]:  # noqa: ARG001
    return ()


def lends_graph_memory() -> bool:
    return False


# --- KV checkpoints --------------------------------------------------------------------------


def inserting_cache(kind: type[UnifiedRadixCache]) -> type:
    class InsertingCache(kind):
        def cache_unfinished_req(self, req: Req, chunked: bool = False, **kwargs: Any) -> None:
            with self.inserting(req):
                super().cache_unfinished_req(req, chunked, **kwargs)

        def cache_finished_req(
            self, req: Req, is_insert: bool = True, *, kv_len_to_handle: int, **kwargs: Any
        ) -> None:
            with self.inserting(req):
                super().cache_finished_req(
                    req, is_insert, kv_len_to_handle=kv_len_to_handle, **kwargs
                )
            self.released(req, kv_len_to_handle if is_insert else None)

    return InsertingCache


INSERTING_METHODS: tuple[str, ...] = ("cache_unfinished_req", "cache_finished_req")


def prefix_namespace(req: Req) -> Any:
    """As in ``v23``."""
    return req.extra_key


def radix_key(req: Req, tokens: int) -> Any:
    """As in ``v23``; salts are a part of ``extra_key``."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey((req.origin_input_ids + req.output_ids)[:tokens], req.extra_key)


def copy_streams(controller: Any) -> tuple[Any, Any]:
    return controller.write_stream, controller.load_stream


def replace_copy_engine(device_module: Any) -> None:
    from sglang.srt.managers import cache_controller

    replace("sglang.srt.managers.cache_controller.device_module", device_module)
    replace(
        "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.device_module", device_module
    )
    cache_controller._timing_events_supported.cache_clear()


def start_load(controller: Any, host_slots: Any, device_slots: Any, load_id: int) -> None:
    from sglang.srt.managers.cache_controller import HiCacheAck, device_module

    from_slots, to_slots = controller.move_indices(host_slots, device_slots)
    begin, end = (device_module.Event(enable_timing=True) for _ in range(2))
    ready = device_module.Event()
    ready.record()
    with device_module.stream(controller.load_stream):
        ready.wait(controller.load_stream)
        controller.load_stream.wait_stream(controller.load_fence_stream)
        begin.record()
        for layer in range(controller.layer_num):
            controller.mem_pool_host.load_to_device_per_layer(
                controller.mem_pool_device, from_slots, to_slots, layer, controller.io_backend
            )
        end.record()
        for slots in (from_slots, to_slots):
            if slots.is_cuda:
                slots.record_stream(controller.load_stream)
    controller.ack_load_queue.append(
        HiCacheAck(begin, end, [load_id], len(to_slots), timing_enabled=True)
    )


# --- Processes -------------------------------------------------------------------------------


def parallel(scheduler: Any) -> Any:
    return scheduler.ps


def start_scheduler(
    kind: Callable[..., Any], server_args: Any, port_args: Any, tp_rank: int, *, configures: bool
) -> Any:
    from sglang.srt.entrypoints.engine import _compute_parallelism_ranks
    from sglang.srt.managers.scheduler import configure_scheduler_process
    from sglang.srt.runtime_context import publish

    gpu_id = server_args.base_gpu_id + tp_rank * server_args.gpu_id_step
    cp_rank, moe_dp_rank, moe_ep_rank = _compute_parallelism_ranks(server_args, tp_rank)
    pp_rank, dp_rank = 0, None
    if configures:
        dp_rank = configure_scheduler_process(
            server_args, gpu_id, tp_rank, cp_rank, moe_dp_rank, moe_ep_rank, pp_rank, dp_rank
        )
    publish(server_args, role="scheduler")
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


def num_core_sets(server_args: Any) -> int:
    """As in ``v23``. Ranks with the same place in their stages share one set, so there are as many
    sets as ranks in a stage."""
    return int(server_args.tp_size)


# --- The HTTP server -------------------------------------------------------------------------


def aborted_errors() -> tuple[type[Exception], ...]:
    from sglang.srt.managers.tokenizer_manager import RequestAbortedError

    return (RequestAbortedError,)


def mend_routes() -> None:
    """As in ``v23``, where SGLang would answer with a 500."""
    from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
    from sglang.srt.managers.io_struct import GenerateReqInput

    def with_ids(*, input_ids: Any = None, **fields: Any) -> Any:
        if input_ids is not None:  # A chat template returns more than the tokens.
            input_ids = list(input_ids["input_ids"])
        return GenerateReqInput(input_ids=input_ids, **fields)

    replace("sglang.srt.entrypoints.ollama.serving.GenerateReqInput", with_ids)

    compute_extra_key = OpenAIServingBase._compute_extra_key

    def checked(self: Any, request: Any) -> Any:
        try:
            return compute_extra_key(self, request)
        except TypeError as error:
            raise ValueError(str(error)) from error  # Which SGLang answers with a 400.

    OpenAIServingBase._compute_extra_key = checked


# --- The benchmark client --------------------------------------------------------------------


def steady_state(
    outputs: Sequence[Any],
    tokenizer: Any,
    concurrency_ratio: float,
    requests: Sequence[Any] | None,
) -> dict[str, Any] | None:
    """As in ``v23``; bench_serving says nothing of it here."""
    del outputs, tokenizer, concurrency_ratio, requests
    return None
