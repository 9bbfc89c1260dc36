"""Settings of SGLang that co-serving refuses."""

from __future__ import annotations

from typing import Any

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.kv_checkpoint import CheckpointMode
from sglang_coserve.errors import UnsupportedError
from sglang_coserve.srt.compat.by_version import model_config_of, settings_of

__all__ = ["check_server_args", "check_window_cache"]


def check_server_args(server_args: Any, config: CoserveConfig) -> None:
    """Refuse settings of SGLang that co-serving cannot be combined with.

    ``server_args`` are those in effect (``settings_of``).

    Raises:
        UnsupportedError: one line per such setting.
    """
    from sglang.srt.environ import envs

    refused = {
        "--pp-async-batch-depth": server_args.pp_async_batch_depth,
        "--kv-checkpoint with pipeline parallelism (--pp-size > 1)": (
            CheckpointMode(config.kv_checkpoint) is not CheckpointMode.OFF
            and server_args.pp_size > 1
        ),
        # SGLang would choose the size of chunks that a plan has chosen.
        "--enable-dynamic-chunking with an --offline-policy that plans": (
            server_args.enable_dynamic_chunking and config.offline_policy != "fifo"
        ),
        "DP attention (--enable-dp-attention, --attn-dp-size)": (
            # Since 0.5.22 it is the width that counts; it may be None.
            server_args.enable_dp_attention or (getattr(server_args, "attn_dp_size", 1) or 1) > 1
        ),
        "speculative decoding (--speculative-algorithm)": server_args.speculative_algorithm,
        "several tokenizer workers (--tokenizer-worker-num > 1)": (
            server_args.tokenizer_worker_num > 1
        ),
        "the Rust server (SGLANG_RUST_SERVER=1)": envs.SGLANG_RUST_SERVER.get(),
        "PD disaggregation (--disaggregation-mode)": server_args.disaggregation_mode != "null",
        # It decides before our plan is asked for. Since 0.5.19.
        "decode steps between prefills (--prefill-decode-interval)": (
            getattr(server_args, "prefill_decode_interval", 0)
        ),
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
        and settings_of(server_args).disable_radix_cache
        and model_config_of(server_args).is_hybrid_swa
    ):
        raise UnsupportedError(
            f"--offline-policy {offline_policy} needs the radix cache for this model, whose "
            "sliding windows have a KV pool of their own: remove --disable-radix-cache, or add "
            "--disable-hybrid-swa-memory or --offline-policy fifo"
        )
