"""SGLang 0.5.17, and what has stayed as it was there; later versions say what has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sglang_coserve.srt.compat.replacements import replace

__all__ = [
    "aborted_errors",
    "cached_prefix_tokens",
    "cached_tokens_of",
    "check_extra_keys",
    "complete_arguments",
    "computed_tokens",
    "copy_streams",
    "exceeds_window_pool",
    "filter_out",
    "free_prepared",
    "has_unsaved_kv",
    "holds_kv",
    "inserting_cache",
    "is_mixed",
    "keep_outputs",
    "lends_graph_memory",
    "logit_processors",
    "model_config_of",
    "num_core_sets",
    "own_number_settings",
    "parallel",
    "place_context",
    "prefix_tokens",
    "protected_tokens",
    "put_back_outputs",
    "radix_key",
    "release_kv",
    "replace_copy_engine",
    "reserve_window_slots",
    "set_computed_tokens",
    "set_extent",
    "settings_of",
    "slot_of",
    "start_load",
    "start_scheduler",
    "steady_state",
    "tensors_beside",
]

Req = Any
ScheduleBatch = Any


# --- Settings (until 0.5.18) ---------------------------------------------------------------


def settings_of(server_args: Any) -> Any:
    """Return the settings in effect, what SGLang derives from others included; to be read only."""
    return server_args


def model_config_of(server_args: Any) -> Any:
    """Return SGLang's ``ModelConfig``."""
    return server_args.get_model_config()


def own_number_settings() -> tuple[str, ...]:
    """Return the names of settings that decide numbers and that other versions lack."""
    return ("torchao_config",)


# --- What a request holds (until 0.5.18) ---------------------------------------------------


def holds_kv(req: Req) -> bool:
    """Return whether a request has a slot and KV of its own."""
    return req.kv is not None


def slot_of(req: Req) -> Any:
    """Return a request's row in the table of slots; None if it has none."""
    return req.req_pool_idx


def computed_tokens(req: Req) -> int:
    """Return how many tokens of a request have KV; under overlap also the one in flight."""
    return int(req.kv_committed_len)


def set_computed_tokens(req: Req, tokens: int) -> None:
    """Set ``computed_tokens`` to ``tokens``."""
    req.kv_committed_len = tokens


def protected_tokens(req: Req) -> int:
    """Return how many tokens of a request have KV that belongs to the radix cache."""
    return int(req.cache_protected_len)


def cached_tokens_of(tree_cache: Any, reqs: Sequence[Req], besides: Sequence[Req]) -> int:
    """Return the tokens in the radix cache that these requests hold, and not those ``besides``.

    Each node counts once. O(requests + nodes above them).
    """
    seen: set[int] = set()
    tokens = 0
    for some, counts in ((besides, False), (reqs, True)):
        for req in some:
            node = tree_cache.resolve_node_handle(req.last_node)
            # Above a node that was seen, all were.
            while node is not None and node.parent is not None and id(node) not in seen:
                seen.add(id(node))
                if counts:
                    tokens += len(node.key)
                node = node.parent
    return tokens


# --- What a request computes next (until 0.5.21) -------------------------------------------


def prefix_tokens(req: Req) -> int:
    """Return where a prefill continues: how many of the tokens are cached or computed."""
    return len(req.prefix_indices)


def cached_prefix_tokens(tree_cache: Any, req: Req) -> int:
    """Return how many leading tokens of a waiting request the radix cache holds on the device.

    Before 0.5.23 it then counts them as used just now, and may split a node.
    """
    # A waiting request must not get a state of its own (Mamba): the pool of states is only as
    # large as the batch.
    req.init_next_round_input(tree_cache, cow_mamba=False)
    return prefix_tokens(req)


def set_extent(req: Req, begin: int, end: int) -> None:
    """Let the next prefill compute the tokens from ``begin``, its prefix, to ``end``."""
    req.set_extend_range(begin, end)


def has_unsaved_kv(req: Req) -> bool:
    """Return whether the last prefill computed something that is not in the radix cache yet."""
    return bool(req.extend_range.end > len(req.prefix_indices))


def place_context(req: Req, slots: Any, scheduler: Any) -> None:  # noqa: ARG001
    """Start a new request after KV that is in ``slots`` already, which become its own."""
    req.prefix_indices = slots


def free_prepared(req: Req, scheduler: Any) -> None:
    """Free what a request of ``place_context`` holds, whether its batch was prepared or not."""
    if slot_of(req) is None:
        scheduler.token_to_kv_pool_allocator.free(req.prefix_indices)
    else:
        release_kv(req, scheduler.tree_cache, keeps=False)


def release_kv(req: Req, tree_cache: Any, *, keeps: bool) -> None:
    """Free a request's slot and KV; what it has computed goes to the radix cache if ``keeps``."""
    from sglang.srt.mem_cache.common import release_kv_cache

    release_kv_cache(req, tree_cache, is_insert=keeps)


def filter_out(batch: ScheduleBatch, reqs: Sequence[Req]) -> None:
    """Remove ``reqs`` and finished requests from a batch."""
    batch.filter_batch(chunked_req_to_exclude=list(reqs))


# --- The admission of prefills into a sliding window's pool (until 0.5.20) -----------------


def is_mixed(adder: Any) -> bool:
    """Return whether a new ``PrefillAdder`` is for a batch that decodes, too."""
    return bool(adder.cur_rem_token_offset > 0)


def reserve_window_slots(adder: Any, tokens: int) -> None:
    """Reserve so many slots of the window's pool, which prefills then cannot take."""
    adder.rem_swa_token_offset += tokens


def exceeds_window_pool(adder: Any, req: Req, tokens: int) -> bool:
    """Return whether the window's pool has no room for a prefill of so many tokens."""
    needed = adder._swa_budget_for_req(tokens, adder._swa_new_tokens(req))
    return bool(needed >= adder.rem_swa_tokens)


# --- Custom logit processors (until 0.5.20) ------------------------------------------------


def logit_processors(sampling_info: Any) -> Iterator[tuple[Any, list[int], Any]]:
    """Yield the custom logit processors of a batch, each with its rows of logits: on the host, and
    as a tensor on the device."""
    for processor, is_of_row in sampling_info.custom_logit_processor.values():
        indices = is_of_row.nonzero().view(-1)
        yield processor, indices.tolist(), indices


# --- What layers hand on (until 0.5.20) ----------------------------------------------------


def keep_outputs(outputs: Any, arguments: Sequence[Any]) -> Any:  # noqa: ARG001
    """Return what is to be kept of a pass that stops now: what the last layer returned, and what
    SGLang hands on beside it.

    To be called within the pass, with the next layer's arguments, by all ranks at the same layer.
    """
    return outputs


def put_back_outputs(kept: Any, arguments: Sequence[Any]) -> Any:  # noqa: ARG001
    """Continue a pass from what ``keep_outputs`` returned; return the layer's own outputs.

    ``arguments`` are those of a layer of that pass.
    """
    return kept


def complete_arguments(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return a layer's arguments as tensors can be kept of them, for a cut of a CUDA graph there.

    To be called in the capture: what completes them becomes a part of the graph.

    Raises:
        StartupError: they cannot be kept.
    """
    return tuple(arguments)


def lends_graph_memory() -> bool:
    """Return whether SGLang lends the memory of its CUDA graphs to other work."""
    from sglang.srt.environ import envs

    variable = getattr(envs, "SGLANG_ENABLE_GRAPH_POOL_BORROW", None)  # Not in every version.
    return variable is not None and bool(variable.get())


def tensors_beside(arguments: Sequence[Any]) -> tuple[Any, ...]:  # noqa: ARG001
    """Return the tensors that a layer is given beside its arguments."""
    return ()


# --- KV checkpoints (until 0.5.17, and calls on changes of requests until 0.5.20) --------------


def inserting_cache(kind: type) -> type:
    """Return ``kind``, a subclass of ``UnifiedRadixCache``, that is notified of requests.

    Of an insertion by the context manager ``inserting(req)``, in which it takes place. Of the
    release of a request's KV, when it is done, by ``released(req, kept_tokens)``: of so many tokens
    the radix cache has KV, None: nothing was inserted.
    """

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


def radix_key(req: Req, tokens: int) -> Any:
    """Return the key of a request's first ``tokens`` tokens in the radix cache."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey((req.origin_input_ids + req.output_ids)[:tokens], req.extra_key)


def copy_streams(controller: Any) -> tuple[Any, Any]:
    """Return the streams of a cache controller's copies: to the host, and to the device."""
    return controller.write_stream, controller.load_stream


def replace_copy_engine(device_module: Any) -> None:
    """Let cache controllers take their streams and events from ``device_module``, in this
    process."""
    from sglang.srt.managers import cache_controller

    replace("sglang.srt.managers.cache_controller.device_module", device_module)
    replace(
        "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.device_module", device_module
    )
    cache_controller._timing_events_supported.cache_clear()


def start_load(controller: Any, host_slots: Any, device_slots: Any, load_id: int) -> None:
    """Copy KV to the device in the background, after all that the device has been given to do.

    Forward passes in flight included, of ``controller.load_fence_stream``: one may still write to
    slots that were freed.

    The end is acknowledged under ``load_id``.
    """
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


# --- Processes (until 0.5.19, and 0.5.20) --------------------------------------------------


def parallel(scheduler: Any) -> Any:
    """Return the ranks and sizes of a scheduler: ``tp_rank``, ``tp_size``, ``pp_size``, …"""
    return scheduler.ps


def start_scheduler(
    kind: Callable[..., Any], server_args: Any, port_args: Any, tp_rank: int, *, configures: bool
) -> Any:
    """Return a scheduler of class ``kind`` with its model loaded, in this process.

    ``configures`` gives the process a title and a log of its own, as SGLang's have.
    """
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
    """Return how many sets of cores ``SGLANG_CPU_OMP_THREADS_BIND`` must name: here each is for the
    ranks of all stages that have the same place among those of a stage (until 0.5.18)."""
    return int(server_args.tp_size)


# --- The HTTP server (0.5.17 only) ---------------------------------------------------------


def aborted_errors() -> tuple[type[Exception], ...]:
    """Return what a request raises that was aborted before the scheduler had it."""
    from sglang.srt.managers.tokenizer_manager import RequestAbortedError

    return (RequestAbortedError,)


def check_extra_keys() -> None:
    """Let a request whose ``extra_key`` is no text be answered with a 400; it is a 500 here."""
    from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase

    compute_extra_key = OpenAIServingBase._compute_extra_key

    def checked(self: Any, request: Any) -> Any:
        try:
            return compute_extra_key(self, request)
        except TypeError as error:
            raise ValueError(str(error)) from error  # Which SGLang answers with a 400.

    OpenAIServingBase._compute_extra_key = checked


# --- The benchmark client (until 0.5.18) ---------------------------------------------------


def steady_state(
    outputs: Sequence[Any],
    tokenizer: Any,
    concurrency_ratio: float,
    requests: Sequence[Any] | None,
) -> dict[str, Any] | None:
    """Return what bench_serving says of the steady state of its answers, of which it makes none
    here.

    Args:
        outputs: Its ``RequestFuncOutput``, one for each request.
        tokenizer: Counts the tokens.
        concurrency_ratio: The share of the peak concurrency that a steady state has.
        requests: Its rows of the dataset.
    """
    del outputs, tokenizer, concurrency_ratio, requests
    return None
