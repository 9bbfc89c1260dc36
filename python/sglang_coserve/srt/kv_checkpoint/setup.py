"""Sets checkpoints up in an engine: SGLang's settings for them, checks, and the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from sglang_coserve.config import CoserveConfig
from sglang_coserve.errors import UnsupportedError
from sglang_coserve.srt import compat
from sglang_coserve.srt.kv_checkpoint.store import CheckpointStore
from sglang_coserve.srt.kv_checkpoint.strategies import STRATEGIES
from sglang_coserve.srt.kv_store import KvStore, KvStoreSetup

BACKEND: Final = "coserve_checkpoint"
"""Name of the cache for SGLang's ``--radix-cache-backend``."""

_OTHER_CACHES: Final = (
    *("disable_radix_cache", "enable_hierarchical_cache", "radix_cache_backend"),
    *("enable_lmcache", "enable_flexkv", "cpu_offload_gb"),
    *("enable_streaming_session", "enable_session_radix_cache"),
    *("enable_unified_cache_external_linker", "enable_unified_memory"),
)


class CheckpointSetup(KvStoreSetup):
    """Sets checkpoints up if ``--kv-checkpoint`` names a strategy."""

    def server_settings(
        self, given: Mapping[str, Any], config: CoserveConfig, *, on_cpu: bool
    ) -> dict[str, Any]:
        """Return the settings of a hierarchical cache with our tree; none when it is off.

        Raises:
            UnsupportedError: one line per given setting that checkpoints cannot be combined with.
        """
        if config.kv_checkpoint not in STRATEGIES:
            return {}
        lines = [
            f"--kv-checkpoint {config.kv_checkpoint} keeps KV in a cache of its own, which "
            f"--{name.replace('_', '-')} replaces or does not know: remove one of them"
            for name in _OTHER_CACHES
            if given.get(name)
        ]
        if (given.get("pp_size") or 1) > 1:
            lines.append(
                f"--kv-checkpoint {config.kv_checkpoint} cannot be combined with --pp-size above "
                "1, as SGLang's stages do not agree when a copy has ended: remove one of them"
            )
        if lines:
            raise UnsupportedError("\n".join(lines))
        return {
            "enable_hierarchical_cache": True,
            "radix_cache_backend": BACKEND,
            "hicache_write_policy": "write_through",
            "hicache_size": config.kv_checkpoint_host_gb or 0,
            # The pool on a CPU knows no other layout.
            **(
                {"hicache_io_backend": "direct", "hicache_mem_layout": "layer_first"}
                if on_cpu
                else {}
            ),
        }

    def check(self, server_args: Any, config: CoserveConfig, *, on_cpu: bool) -> None:
        """Refuse a ``ServerArgs`` with another cache, and a model whose KV cannot be copied.

        Raises:
            UnsupportedError: SGLang would use another cache, or some layers of the model do not
                keep their whole KV.
        """
        if config.kv_checkpoint not in STRATEGIES:
            return
        if server_args.radix_cache_backend != BACKEND:
            raise UnsupportedError(
                "--kv-checkpoint sets fields of ServerArgs before it is made: pass SGLang's "
                "settings as keywords instead of server_args"
            )
        reason = _why_not(compat.model_config_of(server_args), on_cpu=on_cpu)
        if reason is not None:
            raise UnsupportedError(
                f"--kv-checkpoint {config.kv_checkpoint} needs a model whose layers all keep their "
                f"whole KV, and of this one {reason}: use --kv-checkpoint off"
            )

    def register(self, config: CoserveConfig, *, on_cpu: bool) -> None:
        """Register the cache with checkpoints in SGLang; nothing when it is off."""
        from sglang.srt.mem_cache.registry import (
            register_radix_cache_backend,
            registered_radix_cache_backends,
        )

        if config.kv_checkpoint not in STRATEGIES or BACKEND in registered_radix_cache_backends():
            return

        def make_cache(context: Any) -> Any:
            if on_cpu:
                from sglang_coserve.srt.kv_checkpoint.cpu import install_cpu_copies

                # Now that the model is there, so is a device that it emulates.
                install_cpu_copies()
            from sglang_coserve.srt.kv_checkpoint.cache import CheckpointCache

            strategy = STRATEGIES[config.kv_checkpoint]()
            cache = CheckpointCache(context.params, context.server_args, strategy)
            compat.fence_copies(
                cache.cache_controller, context.tp_worker.model_runner.forward_stream
            )
            counter = cache.cache_controller.layer_done_counter
            context.tp_worker.register_hicache_layer_transfer_counter(counter)
            return cache

        register_radix_cache_backend(BACKEND, make_cache)

    def store(self, tree_cache: Any, waited: Callable[[float], None]) -> KvStore:
        """Return the store of a scheduler with the cache with checkpoints; else an empty one."""
        # By attribute, so that SGLang's hierarchical cache need not be imported when off.
        if not hasattr(tree_cache, "checkpoint_step"):
            return KvStore()
        tree_cache.waited = waited
        return CheckpointStore(tree_cache)


def _why_not(model: Any, *, on_cpu: bool) -> str | None:
    """Return why a model's KV, judged by its config, cannot be checkpointed; None if it can."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch, is_deepseek_dsa

    reasons = {
        "layers with a sliding window keep a part of it (--disable-hybrid-swa-memory lets them "
        "keep all)": model.is_hybrid_swa,
        "some layers keep a state instead": mambaish_config(model) is not None,
        "its attention is sparse": is_deepseek_dsa(model.hf_config),
        "latent KV (MLA) is copied on a GPU only": (
            on_cpu and model.attention_arch is AttentionArch.MLA
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
