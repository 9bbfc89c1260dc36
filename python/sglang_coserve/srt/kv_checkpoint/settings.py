"""Derives SGLang's settings from our flags, checks them, and registers the cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.kv_checkpoint import CheckpointMode, CheckpointPolicy
from sglang_coserve.errors import UnsupportedError
from sglang_coserve.srt import compat

BACKEND: Final = "coserve_checkpoint"
"""Name of the cache for SGLang's ``--radix-cache-backend``."""

_OTHER_CACHES: Final = (
    *("disable_radix_cache", "enable_hierarchical_cache", "radix_cache_backend"),
    *("enable_lmcache", "enable_flexkv", "cpu_offload_gb"),
    *("enable_streaming_session", "enable_session_radix_cache"),
    *("enable_unified_cache_external_linker", "enable_unified_memory"),
)


def server_settings(config: CoserveConfig, *, on_cpu: bool) -> dict[str, Any]:
    """Return the fields of SGLang's ``ServerArgs`` that checkpointing needs; none when it is off.

    They must be set before ``ServerArgs`` is created, which derives other fields from them.
    """
    if config.checkpoint_mode is CheckpointMode.OFF:
        return {}
    return {
        "enable_hierarchical_cache": True,
        "radix_cache_backend": BACKEND,
        "hicache_write_policy": "write_through",
        "hicache_size": config.kv_checkpoint_host_gb or 0,
        **({"hicache_io_backend": "direct"} if on_cpu else {}),
        # The one that the pool on a CPU and moved KV know.
        **({"hicache_mem_layout": "layer_first"} if on_cpu or config.kv_move_dir else {}),
    }


def check_combination(settings: Mapping[str, Any], config: CoserveConfig) -> None:
    """Refuse settings of SGLang that checkpointing cannot be combined with.

    ``settings`` are fields of ``ServerArgs``; missing ones have their defaults.

    Raises:
        UnsupportedError: one line per such setting.
    """
    if config.checkpoint_mode is CheckpointMode.OFF:
        return
    lines = [
        f"--kv-checkpoint {config.kv_checkpoint} keeps KV in a cache of its own, which "
        f"--{name.replace('_', '-')} replaces or does not know: remove one of them"
        for name in _OTHER_CACHES
        if settings.get(name)
    ]
    if lines:
        raise UnsupportedError("\n".join(lines))


def check_in_place(server_args: Any, config: CoserveConfig) -> None:
    """Refuse a ``ServerArgs`` that was created without ``server_settings``.

    Raises:
        UnsupportedError: checkpointing is on, and SGLang would use another cache.
    """
    is_on = config.checkpoint_mode is not CheckpointMode.OFF
    if is_on and server_args.radix_cache_backend != BACKEND:
        raise UnsupportedError(
            "--kv-checkpoint sets fields of ServerArgs before it is made: pass SGLang's settings "
            "as keywords instead of server_args"
        )


def check_model(server_args: Any, config: CoserveConfig, *, on_cpu: bool) -> None:
    """Refuse a model whose KV cannot be checkpointed, judged by its config.

    Raises:
        UnsupportedError: checkpointing is on, and some layers do not keep their whole KV.
    """
    if config.checkpoint_mode is CheckpointMode.OFF:
        return
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch, is_deepseek_dsa

    model = compat.model_config_of(server_args)
    reasons = {
        "layers with a sliding window keep a part of it (--disable-hybrid-swa-memory lets them "
        "keep all)": model.is_hybrid_swa,
        "some layers keep a state instead": mambaish_config(model) is not None,
        "its attention is sparse": is_deepseek_dsa(model.hf_config),
        "latent KV (MLA) is copied on a GPU only": (
            on_cpu and model.attention_arch is AttentionArch.MLA
        ),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        raise UnsupportedError(
            f"--kv-checkpoint {config.kv_checkpoint} needs a model whose layers all keep their "
            f"whole KV, and of this one {reason}: use --kv-checkpoint off"
        )


def check_move_dir(config: CoserveConfig) -> None:
    """Check that KV can be left where ``config`` says, and by nobody else be read.

    Raises:
        StartupError: it cannot, or others could read it.
    """
    if config.kv_move_dir is not None:
        from sglang_coserve.srt.kv_checkpoint.kv_directory import KvDirectory

        KvDirectory.check(Path(config.kv_move_dir))


def register_cache(config: CoserveConfig, *, on_cpu: bool) -> None:
    """Register the checkpointing cache in a scheduler process, before the scheduler is created."""
    from sglang.srt.mem_cache.registry import (
        register_radix_cache_backend,
        registered_radix_cache_backends,
    )

    mode = config.checkpoint_mode
    if mode is CheckpointMode.OFF or BACKEND in registered_radix_cache_backends():
        return

    def make_cache(context: Any) -> Any:
        if on_cpu:
            from sglang_coserve.srt.kv_checkpoint.cpu import install_cpu_copies

            install_cpu_copies()  # Now that the model is there, so is a device that it emulates.
        from sglang_coserve.srt.kv_checkpoint.cache import CheckpointCache

        cache = CheckpointCache(
            context.params,
            context.server_args,
            CheckpointPolicy(mode, watermark=config.kv_checkpoint_watermark),
        )
        # SGLang sets it itself since 0.5.22, when the scheduler is there.
        cache.cache_controller.load_fence_stream = context.tp_worker.model_runner.forward_stream
        counter = cache.cache_controller.layer_done_counter
        context.tp_worker.register_hicache_layer_transfer_counter(counter)
        return cache

    register_radix_cache_backend(BACKEND, make_cache)
