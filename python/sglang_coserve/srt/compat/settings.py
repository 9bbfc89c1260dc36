"""Settings of SGLang that co-serving refuses, and why: all of them, before anything is started.

docs/support.md lists them, with what was run of those that are supported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from sglang_coserve.config import CoserveConfig
from sglang_coserve.errors import ConfigError, UnsupportedError
from sglang_coserve.srt.compat.by_version import model_config_of, settings_of

logger = logging.getLogger(__name__)


class _Refusal(NamedTuple):
    is_set: Any
    """Whether the setting has a value that is refused, by its truth."""

    name: str
    reason: str
    instead: str = "remove the setting, or start sglang.launch_server"


@contextmanager
def refusals_of_sglang() -> Iterator[None]:
    """A context in which SGLang's own errors about settings and model become errors of one line.

    The traceback is in the log at ``--log-level debug``.

    Raises:
        ConfigError: instead of what SGLang raises.
    """
    try:
        yield
    except (AssertionError, ImportError, OSError, RuntimeError, ValueError) as error:
        logger.debug("SGLang refused its settings", exc_info=True)
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, RuntimeError):
            reason += " (--log-level debug logs where)"
        raise ConfigError(f"SGLang refuses settings or model: {reason}") from error


def check_server_args(server_args: Any, config: CoserveConfig) -> None:
    """Refuse settings of SGLang that co-serving cannot be combined with.

    ``server_args`` are those in effect (``settings_of``).

    Raises:
        UnsupportedError: one line per such setting.
    """
    refusals = [*_refusals(server_args, config), *_other_decisions(server_args)]
    lines = [
        f"co-serving does not support {refusal.name}: {refusal.reason}: {refusal.instead}"
        for refusal in refusals
        if refusal.is_set
    ]
    if lines:
        raise UnsupportedError("\n".join(lines))


def check_one_replica(server_args: Any) -> None:
    """Refuse what the profiler cannot measure; ``server_args`` are those in effect.

    Raises:
        UnsupportedError: more than one replica, more than one machine, or a pipeline.
    """
    if max(server_args.dp_size, server_args.nnodes, server_args.pp_size) > 1:
        raise UnsupportedError(
            "the profiler measures one replica on one node, without a pipeline: remove "
            "--dp-size, --nnodes and --pp-size; a server with --pp-size takes the profile, "
            "which is of the whole model, as it is"
        )


def check_window_cache(server_args: Any) -> None:
    """Refuse to plan for engines on which planning was seen not to terminate.

    Raises:
        UnsupportedError: layers with a sliding window have a pool of their own, and no radix cache.
    """
    is_cached = not settings_of(server_args).disable_radix_cache
    if not is_cached and model_config_of(server_args).is_hybrid_swa:
        raise UnsupportedError(
            "co-serving needs the radix cache for this model, whose sliding windows have a KV pool "
            "of their own: remove --disable-radix-cache, or add --disable-hybrid-swa-memory"
        )


def _refusals(args: Any, config: CoserveConfig) -> list[_Refusal]:
    from sglang.srt.environ import envs

    return [
        # SGLang runs steps that our scheduler does not compose.
        _Refusal(
            args.pp_async_batch_depth,
            "--pp-async-batch-depth",
            "more batches would be under way than a plan counts",
            "remove it",
        ),
        _Refusal(
            # Since 0.5.22 it is the width that counts; it may be None.
            args.enable_dp_attention or (getattr(args, "attn_dp_size", 1) or 1) > 1,
            "DP attention (--enable-dp-attention, --attn-dp-size)",
            "its ranks run different batches in step with each other, so that none can be "
            "planned or suspended by itself",
            "use --tp-size, or --dp-size for whole replicas",
        ),
        _Refusal(
            args.speculative_algorithm,
            "speculative decoding (--speculative-algorithm)",
            "a step gives a request a varying number of tokens, and drafts take KV of their own, "
            "which plans and predictions do not count",
            "remove it",
        ),
        _Refusal(
            args.disaggregation_mode != "null",
            "PD disaggregation (--disaggregation-mode)",
            "a request waits in queues of SGLang's for the other engine and its KV, past admission "
            "and plans",
            "serve both phases in one engine, whose mixed steps are planned",
        ),
        _Refusal(
            args.dllm_algorithm,
            "diffusion language models (--dllm-algorithm)",
            "SGLang admits and batches their requests in queues of their own",
        ),
        _Refusal(
            args.enable_pdmux,
            "prefills beside decodes on one GPU (--enable-pdmux)",
            "its event loop runs two batches at once",
            "use --enable-mixed-chunk",
        ),
        _Refusal(
            args.encoder_only,
            "an encoder-only server (--encoder-only)",
            "it does not generate, and has no scheduler",
        ),
        # They start processes or routes other than ours.
        _Refusal(
            args.tokenizer_worker_num > 1,
            "several tokenizer workers (--tokenizer-worker-num > 1)",
            "each is a server of its own, without API keys, and batches and exchanges of weights "
            "need one that knows all requests",
            "use one, which tokenizes large prompts in threads, or several servers behind a router",
        ),
        _Refusal(
            envs.SGLANG_RUST_SERVER.get(),
            "the Rust server (SGLANG_RUST_SERVER=1)",
            "it has no marks, no Batch API and no /coserve/status",
            "unset the variable",
        ),
        _Refusal(
            envs.SGLANG_ENABLE_REQUEST_DECOMPRESSION.get(),
            "compressed requests (SGLANG_ENABLE_REQUEST_DECOMPRESSION=1)",
            "they are measured, and their marks are read, before SGLang decompresses them",
            "unset the variable",
        ),
        _Refusal(
            args.enable_http2,
            "HTTP/2 (--enable-http2)",
            "it is served by Granian, where bodies are not taken in at a limited pace",
            "let a proxy in front speak HTTP/2",
        ),
        _Refusal(
            # Since 0.5.22 the port alone starts it, which SGLANG_GRPC_PORT may name as well.
            args.grpc_mode or args.smg_grpc_mode or getattr(args, "grpc_port", None) is not None,
            "gRPC (--grpc-mode, --grpc-port, SGLANG_GRPC_PORT)",
            "its calls pass no limits of bodies and no keys, and it has no Batch API",
            "serve HTTP",
        ),
        _Refusal(
            args.use_ray,
            "Ray (--use-ray)",
            "it makes SGLang's own schedulers, as actors",
            "start one server per machine",
        ),
        # They keep KV outside of the pools that plans count.
        _Refusal(
            args.hicache_storage_backend,
            "HiCache storage (--hicache-storage-backend)",
            "a prefetch holds back what a plan starts, and offline requests, which have a queue of "
            "their own, get none",
            "remove it",
        ),
        _Refusal(
            args.enable_hisparse,
            "hierarchical sparse attention (--enable-hisparse)",
            "it takes prefills out of their batch until their KV is in the host's memory",
        ),
        # Settings of ours that need another one of SGLang.
        _Refusal(
            config.safepoint_decode_graphs and args.device == "cpu",
            "--safepoint-decode-graphs on a CPU",
            "there are no graphs",
            "remove the setting",
        ),
    ]


def _other_decisions(args: Any) -> list[_Refusal]:
    """Return the settings that decide in place of a plan."""
    from sglang.srt.environ import envs

    return [
        _Refusal(
            envs.SGLANG_REQ_RUNNING_TIMEOUT.get() > 0,
            "a time limit of running requests (SGLANG_REQ_RUNNING_TIMEOUT)",
            "SGLang would count the time in which a plan pauses an offline request",
            "unset the variable",
        ),
        _Refusal(
            # Since 0.5.19.
            getattr(args, "prefill_decode_interval", 0),
            "decode steps between prefills (--prefill-decode-interval)",
            "SGLang would decide before a plan is asked for",
        ),
        _Refusal(
            (args.min_free_slots_delay or 0) > 1,
            "prefills that wait for free slots (--min-free-slots-delay)",
            "SGLang would hold back what a plan starts",
        ),
        _Refusal(
            args.enable_prefill_delayer,
            "--enable-prefill-delayer",
            "SGLang would hold back what a plan starts",
        ),
        _Refusal(
            args.enable_dynamic_chunking,
            "--enable-dynamic-chunking",
            "SGLang would choose the size of chunks that a plan has chosen",
        ),
        _Refusal(
            args.schedule_policy != "fcfs",
            f"--schedule-policy {args.schedule_policy}",
            "SGLang would sort what a plan has ordered",
        ),
    ]
