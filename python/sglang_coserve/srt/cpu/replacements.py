"""Replaces what SGLang cannot do on a machine without CUDA.

SGLang's CPU path expects its own kernels and an AMX processor. Without them some kernels and the
attention must be replaced.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang_coserve.replacements import LaunchedFunction
from sglang_coserve.srt import compat


def install_replacements() -> None:
    """Replace the parts of SGLang that need CUDA or are slow without it, in this process.

    Must be called in each process that runs a scheduler, before the scheduler is created.
    """
    # They import SGLang, and the environment is to have its defaults before that.
    from sglang_coserve.srt.cpu.attention import install_attention, install_linear_attention

    _install_pipeline()
    compat.replace_page_allocation()
    _install_ordinary_memory()
    _install_grammar_masks()
    _install_latent_attention()
    _install_shared_experts()
    compat.replace("sglang.srt.layers.sampler.murmur_hash32", _hashed)
    install_attention()
    install_linear_attention()


def _install_pipeline() -> None:
    """Turn NCCL off between the stages of a pipeline; SGLang uses it by default."""
    name = "sglang.srt.distributed.parallel_state.init_model_parallel_group"
    from sglang.srt.distributed.parallel_state import init_model_parallel_group

    compat.replace(name, partial(init_model_parallel_group, use_pynccl=False))


def _hashed(seeds: Any, positions: Any, columns: Any) -> Any:
    """Return 32 bits for each of n rows and m columns, by each row's seed and position."""
    import torch

    seeds = seeds.to(torch.int64)
    rows = _mixed(_mixed(_mixed(seeds & _BITS) ^ (seeds >> 32 & _BITS)) ^ positions)
    return _mixed(rows[:, None] ^ _mixed(columns + 1))


_BITS = 2**32 - 1


def _mixed(bits: Any) -> Any:
    """Return what MurmurHash3 ends with. Products overflow, which leaves the lower bits right."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B & _BITS
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35 & _BITS
    return bits ^ (bits >> 16)


def _install_ordinary_memory() -> None:
    """Use ordinary memory where grammars and LoRA ask for pinned memory, which needs a GPU."""
    import torch

    torch.Tensor.pin_memory = _itself
    for module in ("constrained.xgrammar_backend", "lora.layers", "lora.backend.torch_backend"):
        compat.replace(f"sglang.srt.{module}.torch", _UnpinnedTorch(torch))


def _itself(tensor: Any, *_device: Any) -> Any:
    return tensor


class _UnpinnedTorch:
    """The torch module, whose functions ignore ``pin_memory``."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._torch, name)
        if name not in ("arange", "full", "tensor", "zeros"):
            return value

        def unpinned(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("pin_memory", None)
            return value(*args, **kwargs)

        return unpinned


def _install_grammar_masks() -> None:
    """Apply grammar masks with XGrammar's CPU kernel; SGLang calls only the GPU kernels."""
    import xgrammar
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar, XGrammarGrammarBackend

    def apply_vocab_mask(logits: Any, vocab_mask: Any) -> None:
        xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)

    for owner in (XGrammarGrammar, XGrammarGrammarBackend):
        owner.apply_vocab_mask = staticmethod(apply_vocab_mask)


def _install_latent_attention() -> None:
    """Make DeepSeek's models use MLA on latent KV with torch_native.

    SGLang has no handler for that backend, and its default one needs other kernels.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register(
        "torch_native", lambda _attention, _batch: AttnForwardMethod.MLA
    )


def _install_shared_experts() -> None:
    """Replace the Triton kernel that adds the gated shared experts (Qwen)."""
    compat.replace(
        "sglang.kernels.ops.elementwise.elementwise._fused_gate_sigmoid_mul_add_kernel",
        LaunchedFunction(_add_gated),
    )


def _add_gated(hidden: Any, gate_weight: Any, shared: Any, output: Any, **options: Any) -> None:
    gate = (hidden @ gate_weight).sigmoid()[:, None]
    if options.get("DO_ADD", True):  # Otherwise the output holds nothing yet.
        output += gate * shared
    else:
        output.copy_(gate * shared)
