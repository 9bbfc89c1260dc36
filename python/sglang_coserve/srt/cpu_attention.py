"""Attention on a CPU that computes the new tokens only.

For every row of a prefill or mixed batch, SGLang's torch_native backend computes
the queries of the whole sequence and throws those of cached tokens away: a chunk
of P tokens behind C cached ones costs (P + C)² query–key pairs instead of
P·(P + C), a decode row in a mixed batch (C + 1)² instead of C + 1.

Uses nothing else of this package, so that stock SGLang can be measured with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["NewTokensAttention", "install_attention"]


_BLOCK_TOKENS: Final = 256


def install_attention() -> None:
    """Make ``NewTokensAttention`` the backend named torch_native, in this process."""
    register_attention_backend("torch_native")(NewTokensAttention)


class NewTokensAttention(TorchNativeAttnBackend):
    """The torch_native backend, but a layer of causal self-attention computes what is new.

    Encoders, cross-attention and sliding windows are left to SGLang's own code.
    """

    def _run_sdpa_forward_extend(
        self, query: Any, output: Any, *tensors: Any, causal: bool, **options: Any
    ) -> Any:
        """Attend with all rows' new tokens; both arrays have shape (tokens, heads, head size)."""
        k_cache, v_cache, req_to_token, slots, seq_lens, _, new_lens, encoder_lens = tensors
        if not causal or encoder_lens is not None or _has_window(options):
            return super()._run_sdpa_forward_extend(
                query, output, *tensors, causal=causal, **options
            )
        rows = zip(slots.tolist(), seq_lens.tolist(), new_lens.tolist(), strict=True)
        _attend(query, output, k_cache, v_cache, req_to_token, rows, options["scaling"])
        return output

    def _run_sdpa_forward_decode(
        self, query: Any, output: Any, *tensors: Any, **options: Any
    ) -> Any:
        """Attend with the one new token of each row."""
        k_cache, v_cache, req_to_token, slots, seq_lens, encoder_lens = tensors
        if encoder_lens is not None or _has_window(options):
            return super()._run_sdpa_forward_decode(query, output, *tensors, **options)
        rows = zip(slots.tolist(), seq_lens.tolist(), [1] * len(slots), strict=True)
        _attend(query, output, k_cache, v_cache, req_to_token, rows, options["scaling"])
        return output


def _has_window(options: dict[str, Any]) -> bool:
    size = options["sliding_window_size"]
    return size is not None and size > -1


def _attend(
    query: Any,
    output: Any,
    k_cache: Any,
    v_cache: Any,
    req_to_token: Any,
    rows: Iterable[tuple[int, int, int]],
    scaling: float | None,
) -> None:
    """Attend row by row; a row is its place in ``req_to_token``, its keys and its new tokens.

    Rows are not padded to one batch: that is faster for contexts of tens of tokens
    only, and several times slower when the gathered keys outgrow the processor's cache.
    """
    # The query heads that share a KV head, apart: (tokens, KV heads, sharing heads, head size).
    grouped_heads = (k_cache.shape[1], -1)
    grouped_query = query.unflatten(1, grouped_heads)
    grouped_output = output.unflatten(1, grouped_heads)
    end = 0
    for place, keys, tokens in rows:
        start, end = end, end + tokens
        locations = req_to_token[place, :keys]
        # Several times faster than indexing with the locations.
        key = k_cache.index_select(0, locations).transpose(0, 1).to(query.dtype)[None]
        value = v_cache.index_select(0, locations).transpose(0, 1).to(query.dtype)[None]
        if tokens == 1:
            # A last token needs no mask, so heads that share keys can pose as tokens of one head.
            grouped_output[start:end] = scaled_dot_product_attention(
                grouped_query[start:end], key, value, scale=scaling
            )
        else:
            _attend_chunk(query[start:end], output[start:end], key, value, scaling)


def _attend_chunk(query: Any, output: Any, key: Any, value: Any, scaling: float | None) -> None:
    """Attend with the last tokens of a sequence, each to the keys up to its own.

    In blocks, so that most of the keys behind a token are not computed only to be masked.
    """
    tokens, keys = len(query), key.shape[2]
    for start in range(0, tokens, _BLOCK_TOKENS):
        end = min(start + _BLOCK_TOKENS, tokens)
        visible = keys - tokens + end
        mask = None
        if visible > end - start:
            positions = torch.arange(visible, device=query.device)
            mask = positions <= positions[start - end :, None]
        attended = scaled_dot_product_attention(
            query[start:end].transpose(0, 1)[None],
            key[:, :, :visible],
            value[:, :, :visible],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=True,
        )
        output[start:end] = attended[0].transpose(0, 1)
