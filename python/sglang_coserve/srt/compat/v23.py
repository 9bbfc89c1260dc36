"""SGLang 0.5.23 and later: the functions that ``v17`` has for older versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_coserve.errors import StartupError
from sglang_coserve.replacements import replace

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

Req = Any
ScheduleBatch = Any


# --- Settings ------------------------------------------------------------------------------


def settings_of(server_args: Any) -> Any:
    """Return the settings in effect, what SGLang derives from others included; to be read only.

    The first call derives them, which reads the model's configuration.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view

    server_args.resolve_once()
    return resolving_view(server_args)


def model_config_of(server_args: Any) -> Any:
    """Return SGLang's ``ModelConfig``."""
    from sglang.srt.arg_groups.model_override_base import model_config_of as of_sglang

    return of_sglang(server_args)


def log_settings_through(told: Callable[[Mapping[str, Any]], Any]) -> None:
    """Have SGLang log ``told(settings)`` at its start, which holds the keys otherwise."""
    from sglang.srt.server_args import ServerArgs

    ServerArgs.__repr__ = lambda args: f"ServerArgs({told(vars(args))})"
    replace(
        "sglang.srt.entrypoints.engine._server_args_for_logging",
        lambda args: told(args.resolved_dict()),
    )


def own_number_settings() -> tuple[str, ...]:
    """Return the names of settings that decide numbers and that other versions lack."""
    return ()


def trusts_request_templates(server_args: Any) -> bool:
    """Return whether a request may bring a chat template."""
    return bool(server_args.trust_request_chat_template)


def has_decode_interval() -> bool:
    """Return whether SGLang has ``--prefill-decode-interval``."""
    return True


# --- The scheduler -------------------------------------------------------------------------


def hooked_scheduler(kind: type[Scheduler]) -> type:
    """Return ``kind``, SGLang's scheduler, as a base class that asks its subclass for more.

    - ``adapters_in_use()``: the LoRA adapters of requests that are outside of its batches.
    - ``is_idle(of_sglang, for_health_check)``: whether the engine is idle; SGLang's own answer is
      ``of_sglang``.
    - ``may_flush(of_sglang)``: whether a paused engine may flush its cache, though requests wait.
      SGLang's own answer is what ``of_sglang()`` returns.
    - ``all_requests()``: the requests that learn that the weights have another name.
    """

    class HookedScheduler(kind):
        def can_schedule_lora_req(self, req: Req, running_loras: set[str | None]) -> bool:
            adapters = running_loras | self.adapters_in_use()
            return bool(super().can_schedule_lora_req(req, adapters))

        def is_fully_idle(
            self, for_health_check: bool = False, ignore_waiting: bool = False
        ) -> bool:
            of_sglang = partial(super().is_fully_idle, for_health_check, ignore_waiting)
            if ignore_waiting:
                return bool(self.may_flush(of_sglang))
            return bool(self.is_idle(of_sglang(), for_health_check))

        def record_weight_version_change(self, new_version: str | None) -> None:
            everyone = {*self.collect_inflight_reqs(), *self.all_requests()}
            self.__dict__["collect_inflight_reqs"] = lambda: everyone
            try:
                super().record_weight_version_change(new_version)
            finally:
                del self.collect_inflight_reqs

    return HookedScheduler


def results_in_flight(scheduler: Any) -> Sequence[tuple[ScheduleBatch, Any]]:
    """Return the batches whose results SGLang has not processed yet, each with its result."""
    results: Sequence[tuple[ScheduleBatch, Any]] = scheduler.result_queue
    return results


# --- What a request holds ------------------------------------------------------------------


def holds_kv(req: Req) -> bool:
    """Return whether a request has a slot and KV of its own."""
    return bool(req.kv.holds_kv)


def slot_of(req: Req) -> Any:
    """Return a request's row in the table of slots; None if it has none."""
    return req.kv.req_pool_idx


def computed_tokens(req: Req) -> int:
    """Return how many tokens of a request have KV; under overlap also the one in flight."""
    return int(req.kv.kv_committed_len)


def set_computed_tokens(req: Req, tokens: int) -> None:
    """Set ``computed_tokens`` to ``tokens``."""
    req.kv.kv_committed_len = tokens


def protected_tokens(req: Req) -> int:
    """Return how many tokens of a request have KV that belongs to the radix cache."""
    return int(req.kv.cache_protected_len)


# --- What a request computes next ----------------------------------------------------------


def prefix_tokens(req: Req) -> int:
    """Return where a prefill continues: how many of the tokens are cached or computed."""
    return int(req.prefix_len)


def new_tokens(req: Req) -> int:
    """Return the tokens that the batch being prepared computes of a prompt."""
    return int(req.extend_len)


def cached_prefix_tokens(tree_cache: Any, req: Req) -> int:
    """Return how many leading tokens of a waiting request the radix cache holds on the device.

    The cache is not changed, so that nothing is kept for longer because it was asked for. Where a
    sliding window or a state decides what can be used, the cache is matched: what it finds then
    counts as used just now, and a node may be split.
    """
    core = getattr(tree_cache, "tree_core", None)
    look_up = getattr(core, "match_full_device_prefix", None)
    has_only_kv = len(getattr(core, "components", ())) == 1
    is_plain = req.session is None and req.positional_embed_overrides is None
    if look_up is None or tree_cache.disable or not has_only_kv or not is_plain or req.is_dllm():
        # A waiting request must not get a state of its own (Mamba): the pool of states is only as
        # large as the batch.
        req.init_next_round_input(tree_cache, cow_mamba=False)
        return prefix_tokens(req)
    from sglang.srt.mem_cache.common import _req_radix_key

    req.refresh_fill_ids()
    ids = req.full_untruncated_fill_ids
    most_tokens = req._compute_max_prefix_len(len(ids))
    return int(look_up(_req_radix_key(tree_cache, req, ids, most_tokens))[0])


def set_extent(req: Req, begin: int, end: int) -> None:
    """Let the next prefill compute the tokens from ``begin``, its prefix, to ``end``."""
    assert begin == req.prefix_len, "a prefill goes on where its prefix ends"
    req.extend_end = end


def has_unsaved_kv(req: Req) -> bool:
    """Return whether the last prefill computed something that is not in the radix cache yet."""
    return req.extend_end is not None and bool(req.extend_end > req.prefix_len)


def place_context(req: Req, slots: Any, scheduler: Any) -> None:
    """Start a new request after KV that is in ``slots`` already, which become its own.

    SGLang takes it for a prefill that continues in the row that it has.
    """
    import torch

    pool = scheduler.req_to_token_pool
    rows = pool.alloc([req])
    assert rows is not None, "the limits promise a row"
    tokens = len(slots)
    pool.write((req.kv.req_pool_idx, slice(0, tokens)), slots.to(torch.int32))
    req.prefix_len = tokens
    req.kv.kv_allocated_len = req.kv.kv_committed_len = tokens
    req.inflight_middle_chunks = 1


def free_prepared(req: Req, scheduler: Any) -> None:
    """Free what a request of ``place_context`` holds, whether its batch was prepared or not."""
    if holds_kv(req):
        release_kv(req, scheduler.tree_cache, keeps=False)


def release_kv(req: Req, tree_cache: Any, *, keeps: bool) -> None:
    """Free a request's slot and KV; what it has computed goes to the radix cache if ``keeps``.

    Of an unfinished request nothing goes to a cache that keeps the states of layers, too: it
    would keep a state that the request has moved on.
    """
    from sglang.srt.mem_cache.common import release_kv_cache

    keeps = keeps and (req.finished() or not tree_cache.supports_mamba())
    release_kv_cache(req, tree_cache, checkpoint=keeps)


def filter_out(batch: ScheduleBatch, reqs: Sequence[Req]) -> None:
    """Remove ``reqs`` and finished requests from a batch."""
    batch.filter_batch(reqs_to_exclude=list(reqs))


# --- The admission of prefills into a sliding window's pool ----------------------------------


def is_mixed(adder: Any) -> bool:
    """Return whether a new ``PrefillAdder`` is for a batch that decodes, too."""
    return bool(adder.memory_budget.current_offset > 0)


def reserve_window_slots(adder: Any, tokens: int) -> None:
    """Reserve so many slots of the window's pool, which prefills then cannot take."""
    adder.memory_budget.swa_offset += tokens


def exceeds_window_pool(adder: Any, req: Req, tokens: int) -> bool:
    """Return whether the window's pool has no room for a prefill of so many tokens.

    SGLang shortens a chunk only where the pool would never suffice.
    """
    budget = adder.memory_budget
    needed = budget.swa_tokens(
        tokens, adder._swa_new_tokens(req), chunk_limit=adder.rem_chunk_tokens
    )
    return bool(needed >= budget.remaining_swa)


# --- Custom logit processors -----------------------------------------------------------------


def logit_processors(sampling_info: Any) -> Iterator[tuple[Any, list[int], Any]]:
    """Yield the custom logit processors of a batch, each with its rows of logits: on the host, and
    as a tensor on the device."""
    for entry in sampling_info.custom_logit_processor.values():
        yield entry.processor, entry.rows, entry.indices


# --- What layers hand on: the residual in a stream of the batch's ------------------------------


def keep_outputs(outputs: Any, arguments: Sequence[Any]) -> Any:
    """Return what is to be kept of a pass that stops now: what the last layer returned, and what
    SGLang hands on beside it.

    To be called within the pass, with the next layer's arguments, by all ranks at the same layer.
    A sum over ranks that is still owed is made: its parts may lie in memory that other passes use.
    """
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
    """Continue a pass from what ``keep_outputs`` returned; return the layer's own outputs.

    ``arguments`` are those of a layer of that pass.
    """
    outputs, stream = kept
    if stream is not None:
        _forward_batch(arguments).residual_stream = stream
    return outputs


def complete_arguments(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return a layer's arguments as tensors can be kept of them, for a cut of a CUDA graph there.

    To be called in the capture: what completes them becomes a part of the graph. What a layer
    with experts left to the next one to finish is finished here: its parts are no tensors of ours.

    Raises:
        StartupError: they cannot be kept.
    """
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
    """Return the tensors that a layer is given beside its arguments."""
    batch = _forward_batch(arguments)
    stream = batch and batch.residual_stream
    if stream is None:
        return ()
    pending = stream.pending and stream.pending.value
    return tuple(each for each in (stream.residual, pending) if each is not None)


def _forward_batch(arguments: Sequence[Any]) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    return next((each for each in arguments if isinstance(each, ForwardBatch)), None)


def lends_graph_memory() -> bool:
    """Return whether SGLang lends the memory of its CUDA graphs to other work."""
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_ENABLE_GRAPH_POOL_BORROW.get())


# --- KV checkpoints --------------------------------------------------------------------------


def inserting_cache(kind: type[UnifiedRadixCache]) -> type:
    """Return ``kind``, a subclass of ``UnifiedRadixCache``, that is notified of requests.

    Of an insertion by the context manager ``inserting(req)``, in which it takes place. Of the
    release of a request's KV, when it is done, by ``released(req, kept_tokens)``: of so many tokens
    the radix cache has KV, None: nothing was inserted.
    """

    class InsertingCache(kind):
        def checkpoint_into_tree(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
            with self.inserting(req):
                super().checkpoint_into_tree(req, up_to=up_to, **kwargs)

        def on_release(self, req: Req, *, checkpointed: bool) -> None:
            super().on_release(req, checkpointed=checkpointed)
            self.released(req, req.owned_kv_len() if checkpointed else None)

    return InsertingCache


INSERTING_METHODS: tuple[str, ...] = ("checkpoint_into_tree",)
"""Methods of the radix cache that insert the tokens of the request that is their first argument."""


def own_duplicates_tree(kind: type[UnifiedTreeCore]) -> type:
    """Return ``kind``, SGLang's tree, where the slots on the host of a node that is on the device,
    too, are freed by nobody but us, who count them."""

    class OwnDuplicatesTree(kind):
        def _is_settled_full_host_duplicate(self, node: Any) -> bool:  # noqa: ARG002
            return False

    return OwnDuplicatesTree


def prefix_namespace(req: Req) -> Any:
    """Return what a request's prefix is shared within; None for the common namespace."""
    if req.extra_key is None and req.cache_salt is None:
        return None
    return req.extra_key, req.cache_salt


def radix_key(req: Req, tokens: int) -> Any:
    """Return the key of a request's first ``tokens`` tokens in the radix cache.

    A request's salt keeps its KV from those with another one.
    """
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tokens_of_key = (req.origin_input_ids + req.output_ids)[:tokens]
    return RadixKey(tokens_of_key, req.extra_key, cache_salt=req.cache_salt)


def copy_streams(controller: Any) -> tuple[Any, Any]:
    """Return the streams of a cache controller's copies: to the host, and to the device."""
    engine = controller.l2_transfer_engine
    return engine.device_to_host_stream, engine.host_to_device_stream


def replace_copy_engine(device_module: Any) -> None:
    """Let cache controllers take their streams and events from ``device_module``, in this
    process."""
    from sglang.srt.mem_cache import l2_transfer

    replace("sglang.srt.managers.cache_controller.device_module", device_module)
    replace("sglang.srt.mem_cache.l2_transfer.device_module", device_module)
    l2_transfer._timing_events_supported.cache_clear()


def fence_copies(controller: Any, passes: Any) -> None:
    """Order a cache controller's copies after what the stream ``passes`` has been given to do.

    SGLang does so itself as soon as the scheduler is there.
    """
    controller.load_fence_stream = controller.write_fence_stream = passes


def start_writing(controller: Any) -> None:
    """Start the queued copies to the host, after the forward passes in flight."""
    controller.start_writing()


def start_load(controller: Any, host_slots: Any, device_slots: Any, load_id: int) -> None:
    """Copy KV to the device in the background, after all that the device has been given to do.

    Forward passes in flight included, of ``controller.load_fence_stream``: one may still write to
    slots that were freed.

    The end is acknowledged under ``load_id``.
    """
    from sglang.srt.managers.cache_controller import CacheOperation, HiCacheAck

    operation = CacheOperation(host_slots, device_slots, load_id)
    slots = controller._move_op_indices(operation)
    copy_streams(controller)[1].wait_stream(controller.load_fence_stream)
    copy = controller.l2_transfer_engine.submit_host_to_device(
        controller._l2_load_transfers(*slots),
        transfer_layer_id_max=controller.transfer_layer_id_max,
    )
    controller.ack_load_queue.append(
        HiCacheAck(
            copy.start_event,
            copy.finish_event,
            [load_id],
            len(device_slots),
            timing_enabled=copy.timing_enabled,
        )
    )


# --- Processes -------------------------------------------------------------------------------


def parallel(scheduler: Any) -> Any:  # noqa: ARG001
    """Return the ranks and sizes of a scheduler: ``tp_rank``, ``tp_size``, ``pp_size``, …"""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def start_scheduler(
    kind: Callable[..., Any], server_args: Any, port_args: Any, tp_rank: int, *, configures: bool
) -> Any:
    """Return a scheduler of class ``kind`` with its model loaded, in this process.

    ``configures`` gives the process a title and a log of its own, as SGLang's have.
    """
    from sglang.srt.managers.scheduler import configure_scheduler_process
    from sglang.srt.runtime_context import SpawnRanks, publish

    gpu_id = server_args.base_gpu_id + tp_rank * server_args.gpu_id_step
    # Without pipeline parallelism, which is refused.
    ranks = SpawnRanks(world_rank=tp_rank, dp_rank=None, gpu_id=gpu_id)
    publish(server_args, role="scheduler", ranks=ranks)
    if configures:
        configure_scheduler_process(server_args, gpu_id)
    return kind(server_args, port_args)


def num_core_sets(server_args: Any) -> int:
    """Return how many sets of cores ``SGLANG_CPU_OMP_THREADS_BIND`` must name: one for each rank
    of each replica."""
    return int(server_args.dp_size * server_args.tp_size * server_args.pp_size)


def replace_page_allocation() -> None:
    """Let the paged KV allocator run on a CPU, in this process; SGLang's does so here."""


# --- The HTTP server -------------------------------------------------------------------------


def hooked_tokenizer_manager(kind: type[TokenizerManager]) -> type:
    """Return ``kind``, SGLang's tokenizer manager, as a base class that tells its subclass more.

    - ``begin_session(begin)``: runs ``begin()``, SGLang's answer to a request for a session of
      weight updates, and returns what that returns.
    - ``end_session(end)``: the same at the end of a session.
    - ``engine_has_ended()``: called after the schedulers have ended, before the server ends.
    """

    class HookedTokenizerManager(kind):
        async def begin_weight_update(self, obj: Any, *args: Any, **options: Any) -> Any:
            begin = partial(super().begin_weight_update, obj, *args, **options)
            return await self.begin_session(begin)

        async def end_weight_update(self, obj: Any, *args: Any, **options: Any) -> Any:
            end = partial(super().end_weight_update, obj, *args, **options)
            return await self.end_session(end)

        def set_server_stop_hook(self, hook: Callable[[], None]) -> None:
            def stop() -> None:
                self.engine_has_ended()
                hook()

            super().set_server_stop_hook(stop)

    return HookedTokenizerManager


def aborted_errors() -> tuple[type[Exception], ...]:
    """Return what a request raises that was aborted before the scheduler had it: nothing here,
    SGLang answers as for a running request."""
    return ()


def mend_routes() -> None:
    """Let a request whose ``extra_key`` is no text be answered with a 400, and one to ``/api/chat``
    at all, with transformers 5; SGLang does both here."""


# --- The benchmark client --------------------------------------------------------------------


def steady_state(
    outputs: Sequence[Any],
    tokenizer: Any,
    concurrency_ratio: float,
    requests: Sequence[Any] | None,
) -> dict[str, Any] | None:
    """Return what bench_serving says of the steady state of its answers; None where it finds none.

    Args:
        outputs: Its ``RequestFuncOutput``, one for each request.
        tokenizer: Counts the tokens.
        concurrency_ratio: The share of the peak concurrency that a steady state has.
        requests: Its rows of the dataset.
    """
    from sglang.benchmark.steady_state import calculate_steady_state_metrics

    try:
        found = calculate_steady_state_metrics(outputs, tokenizer, concurrency_ratio, requests)
    except ValueError:
        return None
    return asdict(found)
