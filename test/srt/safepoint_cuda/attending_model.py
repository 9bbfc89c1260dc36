"""Layers with SGLang's attention, over a backend that computes nothing worth it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention, _unified_attention_with_output_impl
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from torch import nn

HEADS, HEAD_DIM, TOKENS = 2, 4, 3


class ScalingBackend(AttentionBackend):
    """Triples the queries; notes which layers attended."""

    def __init__(self) -> None:
        self.attended: list[int] = []

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        self.attended.append(layer.layer_id)
        return q * 3.0

    forward_decode = forward_extend


class AttendingLayer(nn.Module):
    """A layer that is nothing but attention."""

    def __init__(self, layer_id: int, calls: int = 1) -> None:
        super().__init__()
        self.attn = RadixAttention(HEADS, HEAD_DIM, 1.0, HEADS, layer_id)
        self.calls = calls

    def forward(self, x: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        for _ in range(self.calls):
            x = self.attn(x, x, x, forward_batch)
        return x


def some_layers(count: int, calls: int = 1) -> list[AttendingLayer]:
    return [AttendingLayer(number, calls) for number in range(count)]


def inputs() -> torch.Tensor:
    return torch.ones(TOKENS, HEADS * HEAD_DIM)


def extend_batch() -> ForwardBatch:
    """A prefill of one request."""
    tokens = torch.arange(TOKENS)
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=tokens,
        req_pool_indices=torch.zeros(1, dtype=torch.int64),
        seq_lens=torch.tensor([TOKENS]),
        out_cache_loc=tokens,
        seq_lens_sum=TOKENS,
        num_token_non_padded_cpu=TOKENS,
    )


def register_cpu_attention() -> torch.library.Library:
    """Let SGLang's split op run on a CPU, as it does on a GPU; until the library is dropped."""

    def attend(
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output: torch.Tensor,
        save_kv_cache: bool,
        layer_id: int,
        *,
        use_mha_companion: bool = False,
        **rest: Any,
    ) -> None:
        _unified_attention_with_output_impl(
            query, key, value, output, save_kv_cache, layer_id, use_mha_companion, False, **rest
        )

    library = torch.library.Library("sglang", "IMPL")
    library.impl("unified_attention_with_output", attend, "CPU")
    return library
