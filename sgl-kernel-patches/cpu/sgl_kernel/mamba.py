"""Layers that keep a state instead of KV: short convolutions and the gated delta rule.

Row by row and token by token: as plain as the formulas, and as slow. States lie in pools that
all rows share; each function reads and writes the rows' slots in place.
"""

from __future__ import annotations

import torch
from torch.nn.functional import conv1d, normalize, silu, softplus

__all__ = [
    "causal_conv1d_fn_cpu",
    "causal_conv1d_update_cpu",
    "chunk_gated_delta_rule_cpu",
    "fused_gdn_gating_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
]


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    activation: str | None = None,
    **_options: object,
) -> torch.Tensor:
    """Convolve each row behind what came before it; return (channels, tokens).

    Args:
        x: (channels, tokens), row after row.
        weight: (channels, width).
        bias: (channels,)
        conv_states: (slots, channels, width - 1), the tokens before the next one.
        query_start_loc: Where rows begin, and the last one ends.
        cache_indices: The slot of each row.
        has_initial_state: Whether the slot holds the tokens before; else they are zeros.
        activation: ``silu`` or ``swish``, which are the same, or None.
    """
    kept = weight.shape[1] - 1
    output = torch.empty_like(x)
    starts = query_start_loc.tolist()
    for row, slot in enumerate(cache_indices.tolist()):
        start, end = starts[row], starts[row + 1]
        before = conv_states[slot].to(x.dtype)
        if not has_initial_state[row]:
            before = torch.zeros_like(before)
        tokens = torch.cat([before, x[:, start:end]], dim=1)
        output[:, start:end] = conv1d(
            tokens[None], weight[:, None], bias=bias, groups=weight.shape[0]
        )[0]
        conv_states[slot] = tokens[:, -kept:].to(conv_states.dtype)
    return silu(output) if activation else output


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: torch.Tensor,
    **_options: object,
) -> torch.Tensor:
    """Convolve one more token of each row, (rows, channels); as ``causal_conv1d_fn_cpu``."""
    before = conv_state[conv_state_indices].to(x.dtype)
    tokens = torch.cat([before, x[:, :, None]], dim=2)
    output = (tokens * weight).sum(dim=2)
    if bias is not None:
        output = output + bias
    conv_state[conv_state_indices] = tokens[:, :, 1:].to(conv_state.dtype)
    return silu(output) if activation else output


def fused_gdn_gating_cpu(
    A_log: torch.Tensor,  # noqa: N803
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logarithm of how much each state decays and how much it takes in.

    ``a`` and ``b`` have shape (tokens, value heads), the results (1, tokens, value heads).
    """
    decay = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_options: object,
) -> tuple[torch.Tensor, None, None]:
    """Let each row's states read its tokens; return what they say to them.

    Args:
        q: (1, tokens, key heads, key size), rows behind each other.
        k: Like ``q``.
        v: (1, tokens, value heads, value size); key heads are shared evenly.
        g: (1, tokens, value heads), the logarithm of the decay.
        beta: Like ``g``, how much of a value is taken in.
        initial_state: (slots, value heads, value size, key size).
        initial_state_indices: The slot of each row.
        cu_seqlens: Where rows begin, and the last one ends.
    """
    output = torch.empty_like(v)
    shared = v.shape[2] // k.shape[2]
    query = normalize(q[0].float(), dim=-1, eps=1e-6).repeat_interleave(shared, dim=1)
    query = query * k.shape[-1] ** -0.5
    key = normalize(k[0].float(), dim=-1, eps=1e-6).repeat_interleave(shared, dim=1)
    value, decay, share = v[0].float(), g[0].float().exp(), beta[0].float()
    starts = cu_seqlens.tolist()
    for row, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot].float()
        for token in range(starts[row], starts[row + 1]):
            state = state * decay[token, :, None, None]
            known = (state * key[token, :, None, :]).sum(dim=-1)
            new = (value[token] - known) * share[token, :, None]
            state = state + new[:, :, None] * key[token, :, None, :]
            output[0, token] = (state * query[token, :, None, :]).sum(dim=-1).to(output.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
    return output, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: torch.Tensor,  # noqa: N803
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_options: object,
) -> torch.Tensor:
    """The gated delta rule with its gates; the arguments are those of the two functions above."""
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    output, _, _ = chunk_gated_delta_rule_cpu(
        q,
        k,
        v,
        g,
        beta,
        initial_state=initial_state_source,
        initial_state_indices=initial_state_indices,
        cu_seqlens=cu_seqlens,
    )
    return output
