"""CPU replacements for kernels of hybrid models with stateful layers (LFM2, Qwen3-Next)."""

from __future__ import annotations

from typing import Any

import torch
from sgl_kernel import mamba
from torch.nn.functional import silu

from sglang_coserve.srt import compat

__all__ = ["install_linear_attention"]


def install_linear_attention() -> None:
    """Replace the Triton kernels of short convolutions and gated norms, in this process.

    SGLang takes the other kernels from ``sgl_kernel`` by itself.
    """
    convolution = "sglang.srt.layers.attention.mamba.causal_conv1d"
    compat.replace(f"{convolution}._causal_conv1d_fn_triton", mamba.causal_conv1d_fn_cpu)
    compat.replace(f"{convolution}._causal_conv1d_update_triton", mamba.causal_conv1d_update_cpu)
    compat.replace(
        "sglang.kernels.ops.attention.fla.fused_norm_gate.layer_norm_gated_fwd", _gated_rms_norm
    )


def _gated_rms_norm(
    *,
    x: Any,
    g: Any,
    weight: Any,
    activation: str,
    eps: float,
    **_options: Any,
) -> tuple[Any, None, None, Any]:
    """Return ``x`` of shape (tokens, channels), RMS-normalized and gated.

    The other elements of the result are used only in training.
    """
    normed = x.float() * torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.float()
    gate = g.float().sigmoid() if activation == "sigmoid" else silu(g.float())
    return (normed * gate).to(x.dtype), None, None, x
