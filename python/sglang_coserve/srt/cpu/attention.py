"""Attention on a CPU that computes only new tokens, with sliding windows, sinks and logit caps.

For every sequence of a prefill or mixed batch, SGLang's torch_native backend computes
the queries of the whole sequence and discards those of cached tokens: a chunk
of P tokens after C cached ones costs (P + C)² query–key pairs instead of
P·(P + C), a decode in a mixed batch (C + 1)² instead of C + 1.  It has no attention
sinks (gpt-oss) and no logit caps (Gemma 2), and does not read KV from the pool of a
sliding window. Kernels of hybrid models with stateful layers (LFM2, Qwen3-Next) are here, too.

This module imports nothing else of this package, so that stock SGLang can be measured with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from sgl_kernel import mamba
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch.nn.functional import scaled_dot_product_attention, silu

from sglang_coserve.srt import compat

_BLOCK_TOKENS: Final = 256


def install_attention() -> None:
    """Make ``NewTokensAttention`` the backend named torch_native, in this process."""
    register_attention_backend("torch_native")(NewTokensAttention)


class NewTokensAttention(TorchNativeAttnBackend):
    """The torch_native backend, with causal self-attention computed for new tokens only.

    Encoders and cross-attention are left to SGLang's own code.
    """

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **options: Any
    ) -> Any:
        """Compute the attention of all new tokens; ``q`` has one row for each of them."""
        if _is_sglangs(layer, forward_batch):
            return super().forward_extend(q, k, v, layer, forward_batch, *args, **options)
        new_lens = forward_batch.extend_seq_lens.tolist()
        return self._forward(new_lens, q, k, v, layer, forward_batch, *args, **options)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **options: Any
    ) -> Any:
        """Compute the attention of the one new token of each request."""
        if _is_sglangs(layer, forward_batch):
            return super().forward_decode(q, k, v, layer, forward_batch, *args, **options)
        new_lens = [1] * len(forward_batch.req_pool_indices)
        q = q.reshape(-1, layer.tp_q_head_num * layer.qk_head_dim)
        return self._forward(new_lens, q, k, v, layer, forward_batch, *args, **options)

    def _forward(
        self,
        new_lens: list[int],
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        batch: Any,
        save_kv_cache: bool = True,
        sinks: Any = None,
    ) -> Any:
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        heads = layer.tp_q_head_num
        has_size_of_q = layer.qk_head_dim == layer.v_head_dim
        output = (
            torch.empty_like(q)
            if has_size_of_q
            else q.new_empty((q.shape[0], heads * layer.v_head_dim))
        )
        in_window_pool = isinstance(pool, SWAKVPool) and pool.layers_mapping[layer.layer_id][1]
        _attend(
            q.view(-1, heads, layer.qk_head_dim),
            output.view(-1, heads, layer.v_head_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            self.req_to_token_pool.req_to_token,
            pool.full_to_swa_index_mapping if in_window_pool else None,
            zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), new_lens, strict=True),
            _Terms.of(layer, sinks),
        )
        return output


def _is_sglangs(layer: Any, forward_batch: Any) -> bool:
    return (
        layer.is_cross_attention
        or layer.attn_type is AttentionType.ENCODER_ONLY
        or forward_batch.encoder_lens is not None
    )


@dataclass(frozen=True, slots=True)
class _Terms:
    """Attention parameters of a layer."""

    scaling: float | None
    window: int | None
    """Number of preceding tokens that a token attends to; None for all."""

    logit_cap: float
    """Cap of the logits; 0 for none."""

    sinks: Any
    """One additional logit per query head, of shape (heads,); None for none."""

    @classmethod
    def of(cls, layer: Any, sinks: Any) -> _Terms:
        size = layer.sliding_window_size
        window = size if size is not None and size > -1 else None
        return cls(layer.scaling, window, layer.logit_cap or 0.0, sinks)

    @property
    def is_plain(self) -> bool:
        """Whether torch's own attention supports these parameters."""
        return not self.logit_cap and self.sinks is None


def _attend(
    query: Any,
    output: Any,
    k_cache: Any,
    v_cache: Any,
    req_to_token: Any,
    slot_in_window_pool: Any,
    sequences: Iterable[tuple[int, int, int]],
    terms: _Terms,
) -> None:
    """Compute attention sequence by sequence.

    A sequence is its row in ``req_to_token``, its number of keys and its number of new tokens.
    Sequences are not padded to one batch: that is faster only for contexts of tens of tokens,
    and several times slower when the gathered keys exceed the processor's cache.
    """
    # Query heads grouped by shared KV head: (tokens, KV heads, sharing heads, head size).
    grouped_heads = (k_cache.shape[1], -1)
    grouped_query = query.unflatten(1, grouped_heads)
    grouped_output = output.unflatten(1, grouped_heads)
    end = 0
    for place, keys, tokens in sequences:
        start, end = end, end + tokens
        first = 0 if terms.window is None else max(0, keys - tokens - terms.window)
        locations = req_to_token[place, first:keys]
        if slot_in_window_pool is not None:
            locations = slot_in_window_pool[locations]
        # Several times faster than indexing with the locations.
        key = k_cache.index_select(0, locations).transpose(0, 1).to(query.dtype)[None]
        value = v_cache.index_select(0, locations).transpose(0, 1).to(query.dtype)[None]
        if tokens == 1 and terms.is_plain:
            # A last token needs no mask, so heads that share keys can be passed as tokens.
            grouped_output[start:end] = scaled_dot_product_attention(
                grouped_query[start:end], key, value, scale=terms.scaling
            )
        else:
            _attend_chunk(query[start:end], output[start:end], key, value, terms)


def _attend_chunk(query: Any, output: Any, key: Any, value: Any, terms: _Terms) -> None:
    """Compute causal attention of the last tokens of a sequence.

    Done in blocks, so that few of the masked products are computed.
    """
    tokens, keys = len(query), key.shape[2]
    for start in range(0, tokens, _BLOCK_TOKENS):
        end = min(start + _BLOCK_TOKENS, tokens)
        last = keys - tokens + end
        first = 0 if terms.window is None else max(0, last - (end - start) - terms.window)
        attend = _sdpa if terms.is_plain else _written_out
        attended = attend(
            query[start:end].transpose(0, 1)[None],
            key[:, :, first:last],
            value[:, :, first:last],
            _mask(end - start, last - first, terms.window, query.device),
            terms,
        )
        output[start:end] = attended[0].transpose(0, 1)


def _mask(tokens: int, keys: int, window: int | None, device: Any) -> Any:
    """Return the mask of the last tokens, of shape (tokens, keys); None for plain causal."""
    if window is None and keys == tokens:
        return None
    positions = torch.arange(keys, device=device)
    own = positions[keys - tokens :, None]
    seen = positions <= own
    return seen if window is None else seen & (positions >= own - window)


def _sdpa(query: Any, key: Any, value: Any, mask: Any, terms: _Terms) -> Any:
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=terms.scaling,
        enable_gqa=True,
    )


def _written_out(query: Any, key: Any, value: Any, mask: Any, terms: _Terms) -> Any:
    """Compute attention with capped logits or sinks; shapes are (1, heads, tokens, head size)."""
    tokens, keys = query.shape[2], key.shape[2]
    grouped = query.unflatten(1, (key.shape[1], -1))
    scale = terms.scaling if terms.scaling is not None else query.shape[-1] ** -0.5
    logits = grouped @ key.transpose(2, 3)[:, :, None] * scale
    if terms.logit_cap:
        logits = terms.logit_cap * torch.tanh(logits / terms.logit_cap)
    if mask is None:
        mask = torch.ones(tokens, keys, dtype=torch.bool, device=query.device).tril(keys - tokens)
    logits = logits.masked_fill(~mask, -torch.inf)
    if terms.sinks is not None:
        sinks = terms.sinks.to(logits.dtype).view(*grouped.shape[:3], 1, 1)
        logits = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], dim=-1)
    shares = logits.softmax(dim=-1)[..., :keys]
    return (shares @ value[:, :, None]).flatten(1, 2)


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
    """Return ``x`` of shape (rows, channels), RMS-normalized and gated.

    ``g`` has as many elements, and may have more axes: SGLang hands on a part of a projection as
    it lies in memory. The other elements of the result are used only in training.
    """
    normed = x.float() * torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.float()
    g = g.reshape(x.shape).float()
    gate = g.sigmoid() if activation == "sigmoid" else silu(g)
    return (normed * gate).to(x.dtype), None, None, x
