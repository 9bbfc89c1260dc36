"""What co-serving relies on in SGLang beyond its public classes, by dotted names.

Read without importing SGLang: by ``scripts/sglang-seams`` for any wheel, by tests and by
``check_version``. What is imported from SGLang need not be listed: ``seam_check`` finds the
imports in this package's sources. Each entry was checked against the versions it names, the
whole range unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sglang_coserve.srt.compat.continuation import STATEFUL_FIELDS, STATEFUL_PARAMS
from sglang_coserve.srt.compat.versions import NEWEST, OLDEST, version_key

__all__ = ["SEAMS", "NameUse", "Seam", "seams_of"]


class NameUse(StrEnum):
    """How a name is used."""

    OVERRIDDEN = "overridden"
    """A method that a subclass of ours replaces, or that is replaced in SGLang's class."""

    CALLED = "called"
    REPLACED = "replaced"
    """A name of a module that gets another value, by ``compat.replace``."""

    READ = "read"


@dataclass(frozen=True, slots=True)
class Seam:
    """A name in SGLang, and what is required of it."""

    name: str
    """Dotted, from ``sglang`` on."""

    use: NameUse

    parameters: tuple[str, ...] | None = None
    """The first parameters of a function, ``self`` left out; it needs no others. Not checked
    when None."""

    first: str = OLDEST
    last: str = NEWEST
    """The versions it was checked against, and in which it is used."""

    def is_in(self, version: str) -> bool:
        """Return whether ``version`` is expected to have it. A newer one than any checked is."""
        key = version_key(version)
        is_early_enough = self.last == NEWEST or key <= version_key(self.last)
        return version_key(self.first) <= key and is_early_enough


def seams_of(version: str) -> list[Seam]:
    """Return what is relied on in a version."""
    return [seam for seam in SEAMS if seam.is_in(version)]


_Members = Mapping[str, str | None]
"""Names and their parameters, separated by spaces; None where these do not matter."""


def _of(
    owner: str, use: NameUse, members: _Members, *, first: str = OLDEST, last: str = NEWEST
) -> Iterator[Seam]:
    for name, parameters in members.items():
        words = None if parameters is None else tuple(parameters.split())
        yield Seam(f"sglang.{owner}.{name}", use, words, first, last)


def _names(*names: str) -> dict[str, None]:
    return dict.fromkeys(names)


_SCHEDULER: Final = "srt.managers.scheduler.Scheduler"
_MANAGER_MODULE: Final = "srt.managers.tokenizer_manager"
_MANAGER: Final = f"{_MANAGER_MODULE}.TokenizerManager"
_REQ: Final = "srt.managers.schedule_batch.Req"
_BATCH: Final = "srt.managers.schedule_batch.ScheduleBatch"
_CACHE: Final = "srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_TREE: Final = "srt.mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore"
_CONTROLLER: Final = "srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_TRANSFERS: Final = "srt.mem_cache.l2_transfer.L2TransferEngine"
_ADDER: Final = "srt.managers.schedule_policy.PrefillAdder"
_OPENAI: Final = "srt.entrypoints.openai.serving_base.OpenAIServingBase"
_XGRAMMAR: Final = "srt.constrained.xgrammar_backend"
_PENALIZERS: Final = "srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator"
_CONVOLUTION: Final = "srt.layers.attention.mamba.causal_conv1d"
_CUDA_GRAPH: Final = "srt.model_executor.runner_backend_utils.breakable_cuda_graph"

SEAMS: Final[tuple[Seam, ...]] = (
    # --- The scheduler -------------------------------------------------------------------
    *_of(
        _SCHEDULER,
        NameUse.OVERRIDDEN,
        {
            "_add_request_to_queue": "req is_retracted",
            "abort_request": "recv_req",
            "get_internal_state": "recv_req",
            "get_new_batch_prefill": "running_batch",
            "get_next_batch_to_run": "running_batch last_batch",
            "handle_embedding_request": "recv_req",
            "handle_generate_request": "recv_req",
            "init_grammar_manager": "",
            "init_invariant_checker": "",
            "init_load_inquirer": "",
            "init_metrics_reporter": None,
            "init_request_dispatcher": "",
            "init_request_receiver": "",
            "init_watch_dog_memory_saver_input_blocker": "",
            "is_disable_overlap_for_batch": "batch last_batch",
            "is_fully_idle": "for_health_check",
            "on_idle": "",
            "pause_generation": "recv_req",
            "process_batch_result": "batch result",
            "publish_load_snapshot": "force",
            "run_batch": "batch pp_proxy_tensors",
            "run_event_loop": "",
            "update_running_batch": "batch",
        },
    ),
    *_of(
        _SCHEDULER,
        NameUse.OVERRIDDEN,
        {"_can_schedule_lora_req": "req running_loras"},
        last="0.5.19",
    ),
    *_of(
        _SCHEDULER,
        NameUse.OVERRIDDEN,
        {"can_schedule_lora_req": "req running_loras"},
        first="0.5.20",
    ),
    *_of(
        _SCHEDULER,
        NameUse.CALLED,
        {
            "_set_or_validate_priority": "req",
            "flush_cache": "empty_cache",
            "get_num_allocatable_reqs": "running_bs",
            "stash_chunked_request": "req",
        },
    ),
    *_of(
        _SCHEDULER,
        NameUse.READ,
        _names(
            *("_pending_chunked_abort_req", "_request_dispatcher", "chunked_prefill_size"),
            *("chunked_req", "disaggregation_mode", "future_map", "grammar_manager"),
            *("idle_sleeper", "input_blocker", "invariant_checker", "ipc_channels"),
            *("enable_priority_scheduling", "is_hybrid_swa", "is_mixed_chunk", "last_batch"),
            *("load_inquirer", "max_prefill_tokens", "max_req_len", "max_running_requests"),
            *(
                "metrics_reporter",
                "model_config",
                "output_streamer",
                "pool_stats_observer",
                "recv_from_tokenizer",
            ),
            *("running_batch", "server_args", "spec_algorithm", "token_to_kv_pool_allocator"),
            *("tokenizer", "tp_cpu_group", "tp_worker", "tree_cache", "waiting_queue"),
        ),
    ),
    *_of(_SCHEDULER, NameUse.READ, _names("ps"), last="0.5.20"),
    *_of("srt.constrained.grammar_manager.GrammarManager", NameUse.READ, _names("grammar_queue")),
    *_of(
        "srt.managers.scheduler_components.output_sender.SenderWrapper",
        NameUse.OVERRIDDEN,
        {"send_output": "output recv_obj"},
    ),
    *_of(
        "srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer",
        NameUse.CALLED,
        {"stream_output": "reqs return_logprob"},
    ),
    # --- Load ----------------------------------------------------------------------------
    *_of(
        "srt.managers.scheduler_components.load_inquirer.SchedulerLoadInquirer",
        NameUse.OVERRIDDEN,
        {"get_loads": ""},
    ),
    *_of("srt.managers.load_snapshot", NameUse.REPLACED, _names("snapshot_decoder")),
    *_of(
        "srt.managers.load_snapshot.LoadSnapshot",
        NameUse.READ,
        _names("num_running_reqs", "num_total_tokens", "num_waiting_reqs", "timestamp"),
    ),
    *_of(
        "srt.managers.scheduler_components.load_inquirer.SchedulerLoadInquirer",
        NameUse.READ,
        _names(
            *("get_chunked_req", "get_running_batch", "get_waiting_queue", "pool_stats_observer"),
        ),
    ),
    *_of(
        "srt.managers.scheduler_components.pool_stats_observer.SchedulerPoolStatsObserver",
        NameUse.CALLED,
        {"get_pool_stats": ""},
    ),
    *_of(
        "srt.managers.scheduler_components.pool_stats_observer.PoolStats",
        NameUse.CALLED,
        {"update_scheduler_stats": "stats"},
    ),
    *_of(
        "srt.managers.scheduler_components.pool_stats_observer.PoolStats",
        NameUse.READ,
        _names(
            *("full_evictable_size", "full_num_used", "full_token_usage", "is_hybrid_ssm"),
            *("is_hybrid_swa", "mamba_evictable_size", "mamba_num_used", "mamba_usage"),
            *("swa_evictable_size", "swa_num_used", "swa_token_usage"),
        ),
    ),
    *_of(
        "srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter",
        NameUse.READ,
        _names("metrics_collector"),
    ),
    *_of(
        "srt.observability.metrics_collector.SchedulerMetricsCollector",
        NameUse.OVERRIDDEN,
        {"log_stats": "stats"},
    ),
    *_of(
        "srt.observability.metrics_collector.SchedulerStats",
        NameUse.READ,
        _names("num_queue_reqs", "num_running_reqs"),
    ),
    *_of(
        "srt.observability.metrics_collector.QueueCount",
        NameUse.CALLED,
        {"from_reqs": "reqs enable_priority_scheduling"},
    ),
    *_of(
        "srt.mem_cache.base_prefix_cache.BasePrefixCache",
        NameUse.CALLED,
        {"resolve_node_handle": "node_handle"},
    ),
    *_of(_TREE, NameUse.CALLED, {"collect_path_info": "end_node_ids"}, first="0.5.22"),
    *_of(_TREE, NameUse.CALLED, {"match_full_device_prefix": "key"}, first="0.5.23"),
    *_of(
        "srt.mem_cache.common",
        NameUse.CALLED,
        {"_req_radix_key": "tree_cache req token_ids max_prefix_len"},
        first="0.5.23",
    ),
    *_of(
        _REQ,
        NameUse.CALLED,
        {"_compute_max_prefix_len": "input_len", "refresh_fill_ids": ""},
        first="0.5.23",
    ),
    *_of(
        "srt.mem_cache.unified_cache.unified_tree_core_interface.TreePathNodeInfo",
        NameUse.READ,
        _names("node_id", "path_end", "path_start"),
        first="0.5.22",
    ),
    *_of(
        "srt.managers.tokenizer_control_mixin.TokenizerControlMixin",
        NameUse.CALLED,
        {"get_loads": "include dp_rank"},
    ),
    # --- The scheduler, on ---------------------------------------------------------------
    *_of(
        "srt.managers.scheduler",
        NameUse.REPLACED,
        {"PrefillAdder": None, "Scheduler": None},
    ),
    *_of(
        "srt.distributed.parallel_state",
        NameUse.REPLACED,
        {"init_model_parallel_group": "group_ranks local_rank backend use_pynccl"},
    ),
    *_of(
        _ADDER,
        NameUse.OVERRIDDEN,
        {
            "add_chunked_req": "req",
            "add_one_req": "req has_chunked_req truncation_align_size",
        },
    ),
    *_of(
        _ADDER,
        NameUse.CALLED,
        {
            "_lock_node": "last_node",
            "_swa_new_tokens": "req",
            "ceil_paged_tokens": "tokens",
        },
    ),
    *_of(
        _ADDER,
        NameUse.READ,
        _names(
            *("is_hybrid_swa", "new_chunked_req", "rem_chunk_tokens", "running_batch"),
        ),
    ),
    *_of(
        _ADDER,
        NameUse.CALLED,
        {"_swa_budget_for_req": "extend_input_len max_new_tokens swa_host_hit_length"},
        last="0.5.20",
    ),
    *_of(
        _ADDER,
        NameUse.READ,
        _names("cur_rem_token_offset", "rem_swa_token_offset", "rem_swa_tokens"),
        last="0.5.20",
    ),
    *_of(_ADDER, NameUse.READ, _names("memory_budget"), first="0.5.21"),
    *_of(
        "srt.mem_cache.prefill_budget.SWAPrefillBudget",
        NameUse.CALLED,
        {"swa_tokens": "extend_input_len max_new_tokens chunk_limit"},
        first="0.5.21",
    ),
    *_of(
        "srt.mem_cache.prefill_budget.SWAPrefillBudget",
        NameUse.READ,
        _names("current_offset", "remaining_swa", "swa_offset"),
        first="0.5.21",
    ),
    # --- Requests and batches ------------------------------------------------------------
    *_of(_REQ, NameUse.CALLED, {"reset_for_retract": "", "update_reasoning_tokens": None}),
    *_of(
        _REQ,
        NameUse.READ,
        _names(
            *("already_computed", "decode_batch_idx", "extend_batch_idx", "finished_reason"),
            *("full_untruncated_fill_ids", "inflight_middle_chunks", "kv", "last_node"),
            *("origin_input_ids", "output_ids", "retraction_count", "skip_radix_cache_insert"),
            "to_finish",
        ),
    ),
    *_of(
        _BATCH,
        NameUse.CALLED,
        {
            "check_decode_mem": "selected_indices",
            "merge_batch": "other",
            "mix_with_running": "running_batch",
            "prepare_for_decode": "",
            "prepare_for_extend": "",
        },
    ),
    *_of(_REQ, NameUse.READ, _names("kv_committed_len", "req_pool_idx"), last="0.5.18"),
    *_of(
        _REQ,
        NameUse.READ,
        _names("extend_range", "prefix_indices"),
        last="0.5.21",
    ),
    *_of(_REQ, NameUse.CALLED, {"set_extend_range": "start end"}, last="0.5.21"),
    *_of(
        _BATCH,
        NameUse.CALLED,
        {"filter_batch": "chunked_req_to_exclude keep_indices"},
        last="0.5.21",
    ),
    *_of(_BATCH, NameUse.CALLED, {"filter_batch": "reqs_to_exclude keep_indices"}, first="0.5.22"),
    *_of(
        "srt.managers.schedule_batch.ReqKvInfo",
        NameUse.READ,
        _names("holds_kv", "kv_allocated_len", "kv_committed_len", "req_pool_idx"),
        first="0.5.19",
    ),
    *_of(_REQ, NameUse.READ, _names("extend_end", "prefix_len"), first="0.5.22"),
    *_of(
        "srt.mem_cache.common",
        NameUse.CALLED,
        {"release_kv_cache": "req tree_cache is_insert"},
        last="0.5.21",
    ),
    *_of(
        "srt.mem_cache.common",
        NameUse.CALLED,
        {"release_kv_cache": "req tree_cache checkpoint"},
        first="0.5.22",
    ),
    # --- What layers hand on -------------------------------------------------------------
    *_of(
        "srt.layers.layer_boundary.residual.batch",
        NameUse.CALLED,
        {"complete_output": "hidden_states forward_batch"},
        first="0.5.21",
    ),
    *_of(
        "srt.layers.layer_boundary.residual.stream.ResidualStream",
        NameUse.READ,
        _names("pending", "residual"),
        first="0.5.21",
    ),
    # --- Sampling and grammars -----------------------------------------------------------
    *_of(
        "srt.layers.sampler.Sampler",
        NameUse.OVERRIDDEN,
        {"_preprocess_logits": "logits sampling_info", "compute_logprobs_only": None},
    ),
    *_of("srt.layers.sampler", NameUse.REPLACED, _names("multinomial_with_seed")),
    *_of(
        "srt.sampling.sampling_batch_info.SamplingBatchInfo",
        NameUse.READ,
        _names(
            *("custom_logit_processor", "custom_params", "has_custom_logit_processor"),
            *("is_all_greedy", "temperatures"),
        ),
    ),
    *_of(
        "srt.sampling.sampling_batch_info.ProcessorEntry",
        NameUse.READ,
        _names("indices", "processor", "rows"),
        first="0.5.21",
    ),
    *_of("srt.managers.schedule_batch", NameUse.REPLACED, _names("re")),
    *_of("srt.sampling.sampling_batch_info", NameUse.REPLACED, _names("apply_scaling_penalties")),
    *_of(
        "srt.sampling.penaltylib.repetition_penalty",
        NameUse.REPLACED,
        _names("apply_scaling_penalties"),
    ),
    *_of(_PENALIZERS, NameUse.CALLED, {"cumulate_output_tokens": "output_ids"}),
    *_of(_PENALIZERS, NameUse.READ, _names("batch", "penalizers")),
    *_of(
        "srt.constrained.base_grammar_backend.BaseGrammarBackend",
        NameUse.CALLED,
        {"get_cached_or_future_value": "key require_reasoning", "set_cache": "key value"},
    ),
    *_of(_XGRAMMAR, NameUse.REPLACED, _names("GrammarCompiler", "torch")),
    *_of(
        f"{_XGRAMMAR}.XGrammarGrammar",
        NameUse.OVERRIDDEN,
        {"apply_vocab_mask": "logits vocab_mask"},
    ),
    *_of(f"{_XGRAMMAR}.XGrammarGrammarBackend", NameUse.OVERRIDDEN, _names("apply_vocab_mask")),
    # --- The tokenizer manager and the HTTP server ---------------------------------------
    *_of(
        _MANAGER,
        NameUse.OVERRIDDEN,
        {
            "_batch_tokenize_and_process": "batch_size obj",
            "_create_tokenized_object": "obj input_text input_ids",
            "_handle_batch_output": "recv_obj",
            "_send_batch_request": "tokenized_objs",
            "_send_one_request": "tokenized_obj",
            "_should_use_batch_tokenization": "batch_size requests",
            "_tokenize_one_request": "obj",
            "_tokenize_texts": "texts is_cross_encoder",
            "_validate_mm_limits": "obj",
            "_wait_for_model_update_from_disk": "obj",
            "continue_generation": "obj",
            "dump_requests_before_crash": None,
            "generate_request": "obj request",
            "pause_generation": "obj",
            "score_request": None,
            "serving_chat_class": "",
            "update_weights_from_disk": "obj request",
            "update_weights_from_distributed": "obj request",
            "update_weights_from_ipc": "obj request",
            "update_weights_from_tensor": "obj request",
        },
    ),
    *_of(_MANAGER, NameUse.OVERRIDDEN, {"set_server_stop_hook": "hook"}, first="0.5.20"),
    *_of(_MANAGER, NameUse.CALLED, {"config_value": "name", "flush_cache": "timeout_s"}),
    *_of(
        _MANAGER,
        NameUse.READ,
        _names(
            *("incremental_streaming_output", "is_pause", "preferred_sampling_params"),
            *("gracefully_exit", "rid_to_state"),
        ),
    ),
    *_of(f"{_MANAGER_MODULE}.ReqState", NameUse.READ, _names("event", "finished", "output_ids")),
    *_of(
        _MANAGER_MODULE,
        NameUse.REPLACED,
        _names("APIServerReqTimeStats"),
    ),
    *_of(
        "srt.observability.req_time_stats.APIServerReqTimeStats",
        NameUse.CALLED,
        {"get_e2e_latency": "", "get_first_token_latency": ""},
    ),
    *_of(
        "srt.observability.trace.TraceReqContext",
        NameUse.CALLED,
        {"trace_set_root_attrs": "attrs", "trace_slice": "slice"},
    ),
    *_of(
        "srt.observability.trace.TraceReqContext",
        NameUse.READ,
        _names("root_span_context", "thread_context", "tracing_enable"),
    ),
    *_of(
        "srt.managers.io_struct.GenerateReqInput",
        NameUse.READ,
        _names("contains_mm_input", "rid", "stream", *STATEFUL_FIELDS),
    ),
    *_of(
        "srt.managers.io_struct.EmbeddingReqInput",
        NameUse.READ,
        _names("contains_mm_input", "rid", "sampling_params"),
    ),
    *_of("srt.managers.io_struct", NameUse.READ, _names("_USE_PICKLE_IPC")),
    *_of(
        "srt.sampling.sampling_params.SamplingParams",
        NameUse.READ,
        _names("is_normalized", "stream_interval", *STATEFUL_PARAMS),
    ),
    *_of(
        _OPENAI,
        NameUse.OVERRIDDEN,
        {
            "_convert_to_internal_request": "request raw_request",
            "handle_request": "request raw_request",
        },
    ),
    *_of(_OPENAI, NameUse.OVERRIDDEN, {"_compute_extra_key": "request"}, last="0.5.17"),
    *_of(
        "srt.entrypoints.anthropic.serving.AnthropicServing",
        NameUse.OVERRIDDEN,
        {
            "_error_response": "status_code error_type message",
            "_handle_non_streaming": "chat_request anthropic_request raw_request",
            "_handle_streaming": "chat_request anthropic_request raw_request",
            "handle_count_tokens": "request raw_request",
        },
    ),
    *_of(
        "srt.entrypoints.ollama.serving.OllamaServing",
        NameUse.OVERRIDDEN,
        {"handle_chat": "request raw_request", "handle_generate": "request raw_request"},
    ),
    *_of("srt.entrypoints.http_server", NameUse.REPLACED, _names("_setup_and_run_http_server")),
    *_of("srt.entrypoints.http_server", NameUse.READ, _names("_global_state", "app")),
    *_of(
        "srt.entrypoints.http_server",
        NameUse.CALLED,
        {
            "launch_server": (
                "server_args init_tokenizer_manager_func run_scheduler_process_func "
                "run_detokenizer_process_func execute_warmup_func launch_callback"
            )
        },
    ),
    *_of(
        "srt.entrypoints.engine",
        NameUse.CALLED,
        {"init_tokenizer_manager": "server_args port_args TokenizerManagerClass"},
    ),
    *_of(
        "srt.entrypoints.engine",
        NameUse.REPLACED,
        {
            "run_data_parallel_controller_process": (
                "server_args port_args pipe_writer run_scheduler_process_func"
            )
        },
    ),
    *_of("srt.entrypoints.engine.Engine", NameUse.READ, _names("_scheduler_init_result")),
    *_of(
        "srt.server_args.ServerArgs",
        NameUse.OVERRIDDEN,
        {"add_cli_args": None, "from_cli_args": None},
    ),
    *_of("srt.server_args.ServerArgs", NameUse.CALLED, {"get_model_config": ""}, last="0.5.18"),
    *_of("srt.server_args.ServerArgs", NameUse.CALLED, {"resolve_once": ""}, first="0.5.19"),
    # --- Processes of the profiler -------------------------------------------------------
    *_of(
        _SCHEDULER,
        NameUse.CALLED,
        {
            "__init__": (
                "server_args port_args gpu_id tp_rank moe_ep_rank pp_rank attn_cp_rank "
                "moe_dp_rank dp_rank"
            )
        },
        last="0.5.20",
    ),
    *_of(_SCHEDULER, NameUse.CALLED, {"__init__": "server_args port_args"}, first="0.5.21"),
    # --- KV checkpoints: the radix cache -------------------------------------------------
    *_of(
        _CACHE,
        NameUse.OVERRIDDEN,
        {
            "_evict_components": "request_by_type tracker",
            "_execute_and_commit_kv_backup": "action",
            "evict_host": "num_tokens component_type",
            "insert": "params",
            "load_back": "node_id mem_quota req",
            "loading_check": "finish_count",
            "protected_size": "",
            "reset": "",
            "sanity_check": "",
            "writing_check": "write_back finish_count",
        },
    ),
    *_of(
        _CACHE,
        NameUse.OVERRIDDEN,
        {"cache_finished_req": "req is_insert kv_len_to_handle"},
        last="0.5.20",
    ),
    *_of(_CACHE, NameUse.OVERRIDDEN, {"cache_unfinished_req": "req chunked"}, last="0.5.21"),
    *_of(
        _CACHE,
        NameUse.OVERRIDDEN,
        {"insert_req": "req up_to", "on_release": "req inserted"},
        first="0.5.21",
        last="0.5.21",
    ),
    *_of(
        _CACHE,
        NameUse.OVERRIDDEN,
        {"checkpoint_into_tree": "req up_to", "on_release": "req checkpointed"},
        first="0.5.22",
    ),
    *_of(_REQ, NameUse.CALLED, {"owned_kv_len": ""}, first="0.5.21"),
    *_of(
        _CACHE,
        NameUse.CALLED,
        {
            "_all_reduce": "data tp_reduce_op",
            "check_hicache_events": "",
            "init_hicache": "server_args params",
        },
    ),
    *_of(
        _CACHE,
        NameUse.READ,
        _names(
            *("cache_controller", "host_pool_group", "is_write_back", "ongoing_load_back"),
            *(
                "ongoing_write_through",
                "page_size",
                "root_node",
                "tp_group",
                "tp_world_size",
                "tree_core",
            ),
        ),
    ),
    *_of(
        _TREE,
        NameUse.OVERRIDDEN,
        {"_is_host_leaf": "node", "_split_node": "key child split_len", "reset": ""},
    ),
    *_of(_TREE, NameUse.OVERRIDDEN, {"_is_settled_full_host_duplicate": "node"}, first="0.5.18"),
    *_of(
        _TREE,
        NameUse.CALLED,
        {
            "_remove_leaf_from_parent": "node",
            "_unevict_node_on_insert": "node fresh_value",
            "_update_evictable_leaf_sets": "node",
            "commit_backup": "node_id host_indices comp_xfers",
            "demote": "node_id",
            "evict_device_leaf": "node_id is_write_back",
            "finish_write_through": "node_ids ack_id",
            "insert_host": "node_id key host_value hash_value",
            "node_by_id": "node_id",
        },
    ),
    *_of(
        _TREE,
        NameUse.READ,
        _names("eviction_strategy", "evictable_device_leaves", "evictable_host_leaves"),
    ),
    # --- KV checkpoints: copies ----------------------------------------------------------
    *_of(
        _CONTROLLER,
        NameUse.READ,
        _names("ack_load_queue", "ack_write_queue", "layer_done_counter", "write_queue"),
    ),
    *_of(_CONTROLLER, NameUse.CALLED, {"start_writing": ""}),
    *_of(
        _CONTROLLER,
        NameUse.CALLED,
        {"move_indices": "host_indices device_indices"},
        last="0.5.17",
    ),
    *_of(_CONTROLLER, NameUse.READ, _names("load_stream", "write_stream"), last="0.5.17"),
    *_of(
        _CONTROLLER,
        NameUse.CALLED,
        {
            "_l2_load_transfers": "host_indices device_indices pool_transfers",
            "_move_op_indices": "op",
        },
        first="0.5.18",
    ),
    *_of(_CONTROLLER, NameUse.READ, _names("l2_transfer_engine"), first="0.5.18"),
    *_of(_CONTROLLER, NameUse.READ, _names("load_fence_stream"), first="0.5.19"),
    *_of(_CONTROLLER, NameUse.READ, _names("layer_num"), last="0.5.20"),
    *_of(_CONTROLLER, NameUse.READ, _names("transfer_layer_id_max"), first="0.5.21"),
    *_of(
        _TRANSFERS,
        NameUse.READ,
        _names("device_to_host_stream", "host_to_device_stream"),
        first="0.5.18",
    ),
    *_of(
        _TRANSFERS,
        NameUse.CALLED,
        {"submit_host_to_device": "transfers layer_num"},
        first="0.5.18",
        last="0.5.20",
    ),
    *_of(
        _TRANSFERS,
        NameUse.CALLED,
        {"submit_host_to_device": "transfers transfer_layer_id_max"},
        first="0.5.21",
    ),
    *_of("srt.managers.cache_controller", NameUse.REPLACED, _names("device_module")),
    *_of(
        "srt.mem_cache.hybrid_cache.hybrid_cache_controller",
        NameUse.REPLACED,
        _names("device_module"),
        last="0.5.17",
    ),
    *_of("srt.mem_cache.l2_transfer", NameUse.REPLACED, _names("device_module"), first="0.5.18"),
    *_of(
        "srt.managers.cache_controller",
        NameUse.CALLED,
        {"_timing_events_supported": ""},
        last="0.5.17",
    ),
    *_of(
        "srt.mem_cache.l2_transfer",
        NameUse.CALLED,
        {"_timing_events_supported": ""},
        first="0.5.18",
    ),
    *_of(
        "srt.mem_cache.hybrid_cache.hybrid_pool_assembler",
        NameUse.REPLACED,
        _names("get_mha_host_pool_cls"),
    ),
    *_of(
        "srt.mem_cache.pool_host.base",
        NameUse.REPLACED,
        _names("HICACHE_HOST_MEMORY_RESERVE_BYTES"),
    ),
    *_of(
        "srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost",
        NameUse.OVERRIDDEN,
        {
            "backup_from_device_all_layer": "device_pool host_indices device_indices io_backend",
            "init_kv_buffer": "",
            "load_to_device_per_layer": (
                "device_pool host_indices device_indices layer_id io_backend"
            ),
        },
    ),
    *_of(
        "srt.mem_cache.pool_host.base.HostKVCache",
        NameUse.CALLED,
        {
            "alloc": "need_size",
            "available_size": "",
            "free": "indices",
        },
    ),
    *_of(
        "srt.mem_cache.pool_host.base.HostKVCache",
        NameUse.READ,
        _names("logical_size", "size_per_token"),
    ),
    *_of(_REQ, NameUse.READ, _names("best_match_node", "host_hit_length")),
    *_of(_REQ, NameUse.CALLED, {"init_next_round_input": "tree_cache"}),
    *_of(_REQ, NameUse.READ, _names("cache_protected_len"), last="0.5.18"),
    *_of(_REQ, NameUse.READ, _names("cache_salt"), first="0.5.18"),
    *_of(
        "srt.managers.schedule_batch.ReqKvInfo",
        NameUse.READ,
        _names("cache_protected_len"),
        first="0.5.19",
    ),
    # --- Kernels and attention -----------------------------------------------------------
    *_of(
        "srt.mem_cache.allocator.paged",
        NameUse.REPLACED,
        {
            "alloc_decode_kernel": (
                "seq_lens_ptr last_loc_ptr free_page_ptr out_indices bs_upper page_size"
            ),
            "alloc_extend_kernel": (
                "pre_lens_ptr seq_lens_ptr last_loc_ptr free_page_ptr out_indices bs_upper "
                "page_size"
            ),
        },
    ),
    *_of(
        "kernels.ops.elementwise.elementwise",
        NameUse.REPLACED,
        _names("_fused_gate_sigmoid_mul_add_kernel"),
    ),
    *_of(
        "kernels.ops.attention.fla.fused_norm_gate",
        NameUse.REPLACED,
        _names("layer_norm_gated_fwd"),
    ),
    *_of(
        _CONVOLUTION,
        NameUse.REPLACED,
        _names("_causal_conv1d_fn_triton", "_causal_conv1d_update_triton"),
    ),
    *_of("srt.lora.layers", NameUse.REPLACED, _names("torch")),
    *_of("srt.lora.backend.torch_backend", NameUse.REPLACED, _names("torch")),
    *_of("srt.lora.lora_manager.LoRAManager", NameUse.CALLED, {"validate_lora_batch": "lora_ids"}),
    *_of(
        "srt.layers.attention.base_attn_backend.AttentionBackend",
        NameUse.OVERRIDDEN,
        {"forward": "q k v layer forward_batch save_kv_cache"},
    ),
    *_of(
        "srt.layers.attention.torch_native_backend.TorchNativeAttnBackend",
        NameUse.OVERRIDDEN,
        {
            "forward_decode": "q k v layer forward_batch save_kv_cache",
            "forward_extend": "q k v layer forward_batch save_kv_cache",
        },
    ),
    *_of(
        "srt.model_executor.runner_backend.FullCudaGraphBackend",
        NameUse.OVERRIDDEN,
        {
            "capture_one": "shape_key forward_fn capture_inputs post_warmup_hook",
            "cleanup": "",
            "replay": "shape_key static_forward_batch",
        },
    ),
    *_of(
        "srt.model_executor.runner_backend.FullCudaGraphBackend",
        NameUse.READ,
        _names("_capture_stream", "_graphs", "_outputs", "_pool", "_tp_group"),
    ),
    *_of(f"{_CUDA_GRAPH}.BreakableCUDAGraph", NameUse.READ, _names("_break_fns", "_segments")),
    *_of(f"{_CUDA_GRAPH}.breakable_cuda_graph", NameUse.READ, _names("_current_capture_var")),
    *_of(
        "srt.managers.scheduler_components.idle_sleeper.IdleSleeper",
        NameUse.OVERRIDDEN,
        {"maybe_sleep": ""},
    ),
    # --- Its benchmark client ------------------------------------------------------------
    *_of(
        "benchmark.serving",
        NameUse.REPLACED,
        _names("calculate_metrics", "get_dataset", "get_mooncake_request_over_time", "get_request"),
    ),
    *_of("benchmark.serving", NameUse.READ, _names("ASYNC_REQUEST_FUNCS", "RequestFuncOutput")),
    *_of("benchmark.serving", NameUse.CALLED, {"cli_main": ""}),
)
