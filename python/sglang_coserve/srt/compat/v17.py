"""SGLang before 0.5.23: the functions of ``v23``, where each is described.

A docstring here says only what is different in these versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_coserve.replacements import LaunchedFunction, replace

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
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


def trusts_request_templates(server_args: Any) -> bool:  # noqa: ARG001
    return False


def has_decode_interval() -> bool:
    return False


# --- The scheduler -------------------------------------------------------------------------


def hooked_scheduler(kind: type[Scheduler]) -> type:
    """As in ``v23``; SGLang updates no names of weights here, and a paused engine never flushes
    its cache while requests wait."""

    class HookedScheduler(kind):
        def _can_schedule_lora_req(self, req: Req, running_loras: set[str | None]) -> bool:
            adapters = running_loras | self.adapters_in_use()
            return bool(super()._can_schedule_lora_req(req, adapters))

        def is_fully_idle(self, for_health_check: bool = False) -> bool:
            return bool(self.is_idle(super().is_fully_idle(for_health_check), for_health_check))

        def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
            if batch.return_logprob:
                _fill_token_ids_logprobs(result.logits_output)
            super().process_batch_result(batch, result)

    return HookedScheduler


def _fill_token_ids_logprobs(logits_output: Any) -> None:
    """Correct the result of a batch in which only some requests asked for ``token_ids_logprob``.

    SGLang gives the others a plain list where it then wants a tensor, and its scheduler process
    dies of that (sgl-project/sglang#34719).
    """
    import torch

    values = logits_output.next_token_token_ids_logprobs_val
    for i, value in enumerate(values or ()):
        if not torch.is_tensor(value):
            values[i] = torch.tensor(value)


def results_in_flight(scheduler: Any) -> Sequence[tuple[ScheduleBatch, Any]]:
    """See ``v23``. Loops without overlap have no queue of results."""
    results: Sequence[tuple[ScheduleBatch, Any]] = getattr(scheduler, "result_queue", ())
    return results


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


def own_duplicates_tree(kind: type[UnifiedTreeCore]) -> type:
    """As in ``v23``; SGLang frees no such slots here."""
    return kind


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


def fence_copies(controller: Any, passes: Any) -> None:
    """As in ``v23``; nothing of SGLang reads the attribute."""
    controller.load_fence_stream = passes


def start_writing(controller: Any) -> None:
    """As in ``v23``. SGLang orders copies after a part of the pass only, if it runs in a graph."""
    controller.write_stream.wait_stream(controller.load_fence_stream)
    controller.start_writing()


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


def replace_page_allocation() -> None:
    """Replace the two Triton kernels of the paged KV allocator."""
    allocator = "sglang.srt.mem_cache.allocator.paged"
    replace(f"{allocator}.alloc_extend_kernel", LaunchedFunction(_alloc_extend))
    replace(f"{allocator}.alloc_decode_kernel", LaunchedFunction(_alloc_decode))


def _alloc_extend(
    prefix_lens: Any,
    seq_lens: Any,
    last_loc: Any,
    free_pages: Any,
    out_indices: Any,
    _batch_upper: int,
    page_size: int,
) -> None:
    """Allocate the slots of each request's tokens [prefix, seq): in its open page, then new ones.

    Writes nothing if there are too few free pages: the caller checks for that
    after the launch and discards the result.
    """
    from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

    new_pages = -(-seq_lens // page_size) - -(-prefix_lens // page_size)
    if new_pages.sum() <= len(free_pages):
        alloc_extend_naive(
            *(prefix_lens, seq_lens, last_loc, free_pages, out_indices),
            *(page_size, free_pages.device),
        )


def _alloc_decode(
    seq_lens: Any,
    last_loc: Any,
    free_pages: Any,
    out_indices: Any,
    _batch_upper: int,
    page_size: int,
) -> None:
    """Allocate one slot for each request: after its last one, or the first of a new page."""
    opens_page = (seq_lens - 1) % page_size == 0
    new_pages = int(opens_page.sum())
    if new_pages > len(free_pages):
        return
    slots = last_loc.long() + 1
    slots[opens_page] = free_pages[:new_pages] * page_size
    out_indices.copy_(slots)


# --- The HTTP server -------------------------------------------------------------------------


def hooked_tokenizer_manager(kind: type[TokenizerManager]) -> type:
    """See ``v23``. This version has no sessions, and tells no manager of the end."""
    return kind


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
