"""What depends on the version of SGLang: the one this package is written for, and its seams.

Moving to another version starts here: what co-serving overrides or calls of SGLang's classes
and modules is looked up by ``missing_seams``, which tests call. Attributes that only instances
have (``waiting_queue``, ``chunked_req``, …) are used where they are needed.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from sglang_coserve.config import CoserveConfig
from sglang_coserve.errors import UnsupportedError
from sglang_coserve.srt.request_marks import is_offline

__all__ = [
    "SGLANG_VERSION",
    "UPDATE_COMMUNICATORS",
    "check_logit_processor",
    "check_server_args",
    "check_version",
    "check_window_cache",
    "fill_token_ids_logprobs",
    "lowest_priority",
    "missing_seams",
    "refused_request",
    "release_aborted",
    "release_for_requeue",
    "release_uncomputed",
]

SGLANG_VERSION = "0.5.17"

_SCHEDULER_METHODS = (
    "_add_request_to_queue",
    "_can_schedule_lora_req",
    "_set_or_validate_priority",
    "abort_request",
    "get_init_info",
    "get_internal_state",
    "get_new_batch_prefill",
    "get_next_batch_to_run",
    "get_num_allocatable_reqs",
    "handle_generate_request",
    "init_grammar_manager",
    "init_invariant_checker",
    "init_req_max_new_tokens",
    "init_request_dispatcher",
    "init_request_receiver",
    "init_watch_dog_memory_saver_input_blocker",
    "is_disable_overlap_for_batch",
    "is_fully_idle",
    "on_idle",
    "pause_generation",
    "process_batch_result",
    "run_batch",
    "run_event_loop",
    "update_running_batch",
)

UPDATE_COMMUNICATORS = (
    "update_weights_from_distributed_communicator",
    "update_weights_from_ipc_communicator",
    "update_weights_from_tensor_communicator",
)
"""What a tokenizer manager sends weight updates with, once no request is in flight."""

_WEIGHT_UPDATES = (
    "continue_generation",
    "pause_generation",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_ipc",
    "update_weights_from_tensor",
)


def check_version() -> None:
    """Refuse any SGLang but the one this package is written for.

    Raises:
        UnsupportedError: another version, or none, is installed.
    """
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != SGLANG_VERSION:
        raise UnsupportedError(
            f"sglang_coserve needs SGLang {SGLANG_VERSION}, found {found}: "
            f"pip install sglang=={SGLANG_VERSION}"
        )


def check_server_args(server_args: Any, config: CoserveConfig) -> None:
    """Refuse settings of SGLang that co-serving cannot be combined with.

    Raises:
        UnsupportedError: one line per such setting.
    """
    from sglang.srt.environ import envs

    refused = {
        "pipeline parallelism (--pp-size > 1)": server_args.pp_size > 1,
        "DP attention (--enable-dp-attention)": server_args.enable_dp_attention,
        "speculative decoding (--speculative-algorithm)": server_args.speculative_algorithm,
        "several tokenizer workers (--tokenizer-worker-num > 1)": (
            server_args.tokenizer_worker_num > 1
        ),
        "the Rust server (SGLANG_RUST_SERVER=1)": envs.SGLANG_RUST_SERVER.get(),
        "PD disaggregation (--disaggregation-mode)": server_args.disaggregation_mode != "null",
        "diffusion language models (--dllm-algorithm)": server_args.dllm_algorithm,
        "HiCache storage (--hicache-storage-backend)": server_args.hicache_storage_backend,
        "hierarchical sparse attention (--enable-hisparse)": server_args.enable_hisparse,
        "the gRPC server (--grpc-mode)": server_args.grpc_mode or server_args.smg_grpc_mode,
        "Ray (--use-ray)": server_args.use_ray,
        "an encoder-only server (--encoder-only)": server_args.encoder_only,
        "--safepoint-decode-graphs on a CPU": (
            config.safepoint_decode_graphs and server_args.device == "cpu"
        ),
        f"--schedule-policy {server_args.schedule_policy} with an --offline-policy that plans": (
            config.offline_policy != "fifo" and server_args.schedule_policy != "fcfs"
        ),
    }
    lines = [
        f"co-serving does not support {name}: remove the setting, or start sglang.launch_server"
        for name, is_set in refused.items()
        if is_set
    ]
    if lines:
        raise UnsupportedError("\n".join(lines))


def check_window_cache(server_args: Any, offline_policy: str) -> None:
    """Refuse to plan what was seen to come to no end.

    Raises:
        UnsupportedError: layers with a sliding window have a pool of their own, and no radix cache.
    """
    if (
        offline_policy != "fifo"
        and server_args.disable_radix_cache
        and server_args.get_model_config().is_hybrid_swa
    ):
        raise UnsupportedError(
            f"--offline-policy {offline_policy} needs the radix cache for this model, whose "
            "sliding windows have a KV pool of their own: remove --disable-radix-cache, or add "
            "--disable-hybrid-swa-memory or --offline-policy fifo"
        )


def missing_seams() -> list[str]:
    """Name the parts of SGLang that co-serving overrides or calls and that are not there."""
    from sglang.kernels.ops.attention.fla import fused_norm_gate
    from sglang.kernels.ops.elementwise import elementwise
    from sglang.srt.constrained import xgrammar_backend
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar, XGrammarGrammarBackend
    from sglang.srt.entrypoints import http_server
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.ollama.serving import OllamaServing
    from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
    from sglang.srt.layers import sampler
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.attention.mamba import causal_conv1d
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.managers import schedule_batch
    from sglang.srt.managers import scheduler as scheduler_module
    from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.mem_cache.allocator import paged
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.model_executor.runner_backend import FullCudaGraphBackend
    from sglang.srt.model_executor.runner_backend_utils import breakable_cuda_graph
    from sglang.srt.sampling import sampling_batch_info
    from sglang.srt.sampling.penaltylib import repetition_penalty
    from sglang.srt.sampling.penaltylib.orchestrator import BatchedPenalizerOrchestrator
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_coserve.srt.batch_backend.continuation import STATEFUL_FIELDS, STATEFUL_PARAMS

    seams = {
        Scheduler: _SCHEDULER_METHODS,
        scheduler_module: ("PrefillAdder",),
        PrefillAdder: ("add_chunked_req",),
        TokenizerManager: (
            *("_batch_tokenize_and_process", "_create_tokenized_object", "_handle_batch_output"),
            *("_should_use_batch_tokenization", "_tokenize_one_request", "_tokenize_texts"),
            *("_validate_mm_limits", "generate_request", "score_request", "serving_chat_class"),
            *("dump_requests_before_crash", "config_value", "flush_cache"),
            *("_wait_for_model_update_from_disk", *_WEIGHT_UPDATES),
        ),
        Sampler: ("_preprocess_logits", "compute_logprobs_only"),
        schedule_batch: ("re",),
        sampler: ("multinomial_with_seed",),
        sampling_batch_info: ("apply_scaling_penalties",),
        repetition_penalty: ("apply_scaling_penalties",),
        BaseGrammarBackend: ("get_cached_or_future_value", "set_cache"),
        xgrammar_backend: ("GrammarCompiler",),
        OpenAIServingBase: (
            *("_compute_extra_key", "_convert_to_internal_request", "handle_request"),
        ),
        AnthropicServing: (
            *("_error_response", "_handle_non_streaming", "_handle_streaming"),
            "handle_count_tokens",
        ),
        OllamaServing: ("handle_chat", "handle_generate"),
        GenerateReqInput: ("contains_mm_input", "rid", "stream", *STATEFUL_FIELDS),
        EmbeddingReqInput: ("contains_mm_input", "rid", "sampling_params"),
        SamplingParams: ("is_normalized", "stream_interval", *STATEFUL_PARAMS),
        Req: ("update_reasoning_tokens",),
        http_server: ("_setup_and_run_http_server",),
        paged: ("alloc_decode_kernel", "alloc_extend_kernel"),
        attention_registry: ("register_attention_backend",),
        UnifiedRadixCache: (
            *("_evict_components", "_execute_and_commit_kv_backup", "cache_finished_req"),
            *("writing_check", "loading_check", "check_hicache_events", "load_back"),
        ),
        UnifiedTreeCore: (
            *("_is_host_leaf", "_remove_leaf_from_parent", "_split_node"),
            *("_unevict_node_on_insert", "_update_evictable_leaf_sets", "demote"),
            *("commit_backup", "evict_device_leaf", "finish_write_through", "node_by_id"),
        ),
        BatchedPenalizerOrchestrator: ("batch", "cumulate_output_tokens"),
        LoRAManager: ("validate_lora_batch",),
        XGrammarGrammar: ("apply_vocab_mask",),
        XGrammarGrammarBackend: ("apply_vocab_mask",),
        AttentionBackend: ("forward",),
        elementwise: ("_fused_gate_sigmoid_mul_add_kernel",),
        fused_norm_gate: ("layer_norm_gated_fwd",),
        causal_conv1d: ("_causal_conv1d_fn_triton", "_causal_conv1d_update_triton"),
        FullCudaGraphBackend: ("capture_one", "cleanup", "replay"),
        breakable_cuda_graph: ("BreakableCUDAGraphCapture", "eager_on_graph"),
        TorchNativeAttnBackend: ("forward_decode", "forward_extend"),
    }
    return [
        f"{owner.__name__.rpartition('.')[2]}.{name}"
        for owner, names in seams.items()
        for name in names
        if not hasattr(owner, name)
    ]


def release_for_requeue(req: Any, tree_cache: Any) -> None:
    """Free a running request's slot and KV so that it can wait again with its progress.

    What it has computed goes to the radix cache, from where it is evicted when
    memory is needed and matched again when not.
    """
    from sglang.srt.mem_cache.common import release_kv_cache

    release_kv_cache(req, tree_cache, is_insert=True)
    req.reset_for_retract()


def release_uncomputed(req: Any, tree_cache: Any) -> None:
    """Free the slot and KV of a request whose prefill was prepared but has not run.

    Nothing goes to the radix cache. To its client an online request was not retracted.
    """
    from sglang.srt.mem_cache.common import release_kv_cache

    retractions = req.retraction_count
    release_kv_cache(req, tree_cache, is_insert=False)
    req.reset_for_retract()
    if not is_offline(req):
        req.retraction_count = retractions


def release_aborted(req: Any, tree_cache: Any) -> None:
    """Free the slot and KV of a request that is aborted while no batch holds it."""
    from sglang.srt.disaggregation.utils import prepare_abort
    from sglang.srt.mem_cache.common import release_kv_cache

    prepare_abort(req, "Aborted")
    release_kv_cache(req, tree_cache, is_insert=True)


def fill_token_ids_logprobs(logits_output: Any) -> None:
    """Mend the result of a batch in which only some rows asked for ``token_ids_logprob``.

    SGLang 0.5.17 gives the others a plain list where it then wants a tensor, and its
    scheduler process dies of that (sgl-project/sglang#34719).
    """
    import torch

    values = logits_output.next_token_token_ids_logprobs_val
    for i, value in enumerate(values or ()):
        if not torch.is_tensor(value):
            values[i] = torch.tensor(value)


def check_logit_processor(recv_req: Any) -> None:
    """Make a request's custom logit processor once, which SGLang keeps.

    Raises:
        ValueError: it cannot be made; in a batch, that would end the scheduler process.
    """
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    if recv_req.custom_logit_processor is not None:
        try:
            CustomLogitProcessor.from_str(recv_req.custom_logit_processor)
        except Exception as error:
            raise ValueError(f"custom_logit_processor: {type(error).__name__}: {error}") from error


def refused_request(recv_req: Any, tokenizer: Any, vocab_size: int, message: str) -> Any:
    """Return a ``Req`` that is answered with a 400 and ``message`` in SGLang's own way."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=1)
    params.normalize(tokenizer)
    req = Req(
        recv_req.rid,
        None,
        recv_req.input_ids,
        params,
        stream=recv_req.stream,
        vocab_size=vocab_size,
        http_worker_ipc=recv_req.http_worker_ipc,
    )
    req.tokenizer = tokenizer
    req.set_finish_with_abort(message)
    return req


def lowest_priority(low_values_first: bool) -> int:
    """Return the ``Req.priority`` that any other request precedes."""
    import sys

    return sys.maxsize if low_values_first else -sys.maxsize - 1
