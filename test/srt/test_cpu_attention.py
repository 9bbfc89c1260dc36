"""Our attention on CPUs against SGLang's own, on SGLang's pools, layers and call path."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from torch.utils.flop_counter import FlopCounterMode

from sglang_coserve.srt.cpu.attention import NewTokensAttention, _gated_rms_norm

PAGE_TOKENS = 4
KV_TOKENS = 8192
HEAD_DIM = 16
SCALING = 0.3
ENCODER_TOKENS = 7

Sequences = list[tuple[int, int]]
"""New tokens and cached tokens of each sequence."""

SEQUENCES = st.lists(
    st.tuples(
        st.one_of(st.just(1), st.integers(1, 40), st.integers(250, 600)),
        st.one_of(st.just(0), st.integers(0, 300)),
    ),
    min_size=1,
    max_size=5,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other would take most of the time on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Case:
    """One batch on KV pools with random contents and pages in random order."""

    def __init__(
        self,
        sequences: Sequences,
        *,
        kv_heads: int = 2,
        sharing_heads: int = 2,
        encoder: bool = False,
        kv_dtype: torch.dtype = torch.float32,
        seed: int = 0,
        **layer: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(tokens: int, heads: int) -> torch.Tensor:
            return torch.randn(tokens, heads, HEAD_DIM, generator=generator)

        heads = kv_heads * sharing_heads
        self.layer = RadixAttention(heads, HEAD_DIM, SCALING, kv_heads, 0, **layer)
        new, cached = torch.tensor(sequences).unbind(1)
        encoder_tokens = ENCODER_TOKENS if encoder else 0
        table = ReqToTokenPool(len(sequences), 2048, "cpu", enable_memory_saver=False)
        self.kv = MHATokenToKVPool(
            KV_TOKENS, PAGE_TOKENS, kv_dtype, kv_heads, HEAD_DIM, 1, "cpu", False
        )
        for buffer in (self.kv.k_buffer[0], self.kv.v_buffer[0]):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        pages = (1 + torch.randperm(KV_TOKENS // PAGE_TOKENS, generator=generator)).tolist()
        new_slots = []
        for row, (tokens, context) in enumerate(sequences, start=1):
            total = encoder_tokens + tokens + context
            slots = torch.tensor(
                [
                    page * PAGE_TOKENS + offset
                    for page in (pages.pop() for _ in range(-(-total // PAGE_TOKENS)))
                    for offset in range(PAGE_TOKENS)
                ]
            )[:total]
            table.req_to_token[row, :total] = slots
            new_slots.append(slots[total - tokens :])
        self.batch = SimpleNamespace(
            req_pool_indices=torch.arange(1, len(sequences) + 1),
            seq_lens=new + cached,
            extend_seq_lens=new,
            extend_prefix_lens=cached,
            out_cache_loc=torch.cat(new_slots),
            encoder_out_cache_loc=None,
            encoder_lens=torch.full((len(sequences),), ENCODER_TOKENS) if encoder else None,
        )
        self.runner = SimpleNamespace(
            device="cpu", req_to_token_pool=table, token_to_kv_pool=self.kv
        )
        tokens = int(new.sum())
        self.qkv = (
            random(tokens, heads).flatten(1),
            random(tokens, kv_heads),
            random(tokens, kv_heads),
        )

    def run(self, backend: type[TorchNativeAttnBackend], *, decode: bool) -> torch.Tensor:
        """Return one layer's output; write the new keys and values unless there is an encoder."""
        made = backend(self.runner)
        forward = made.forward_decode if decode else made.forward_extend
        saves = self.batch.encoder_lens is None
        return forward(*self.qkv, self.layer, self.batch, save_kv_cache=saves)


def assert_same(case: Case, *, decode: bool = False) -> None:
    expected = case.run(TorchNativeAttnBackend, decode=decode)
    torch.testing.assert_close(
        case.run(NewTokensAttention, decode=decode), expected, atol=1e-5, rtol=1e-5
    )


@settings(deadline=None)
@given(
    sequences=SEQUENCES,
    kv_heads=st.integers(1, 3),
    sharing_heads=st.integers(1, 4),
    window=st.none() | st.integers(0, 300),
    kv_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**63 - 1),
)
def test_extends_and_decodes_agree_with_sglang(
    sequences: Sequences, window: int | None, **options: Any
) -> None:
    layer = {} if window is None else {"sliding_window_size": window}
    assert_same(Case(sequences, **options, **layer))
    assert_same(Case([(1, cached) for _, cached in sequences], **options, **layer), decode=True)


def computed_pairs(case: Case, backend: type[TorchNativeAttnBackend]) -> float:
    """Return the query–key pairs that attention computes, per head."""

    def pairs(query: torch.Size, key: torch.Size, *_: Any, **__: Any) -> int:
        batch, heads, queries, _dim = query
        return batch * heads * queries * key[-2]

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={attention: pairs}) as counter:
        case.run(backend, decode=False)
    return counter.get_total_flops() / case.layer.tp_q_head_num


def test_only_the_queries_of_new_tokens_are_computed() -> None:
    sequences = [(32, 0), (8, 64), (1, 100), (1, 0)]
    case = Case(sequences)
    pairs_of_new = sum(new * (new + cached) for new, cached in sequences)
    assert computed_pairs(case, NewTokensAttention) == pairs_of_new
    pairs_of_all = sum((new + cached) ** 2 for new, cached in sequences)
    assert computed_pairs(case, TorchNativeAttnBackend) == pairs_of_all


def test_a_long_chunk_leaves_out_keys_that_no_token_of_a_block_sees() -> None:
    new, cached = 1024, 100
    seen = new * cached + new * (new + 1) / 2
    computed = computed_pairs(Case([(new, cached)]), NewTokensAttention)
    assert seen <= computed < 1.25 * seen


LEFT_TO_SGLANG: dict[str, dict[str, Any]] = {
    "an encoder": {"attn_type": AttentionType.ENCODER_ONLY},
    "cross-attention": {"is_cross_attention": True, "encoder": True},
    "self-attention beside cross-attention": {"encoder": True},
}


@pytest.mark.parametrize("options", LEFT_TO_SGLANG.values(), ids=LEFT_TO_SGLANG)
def test_other_attention_is_sglangs(options: dict[str, Any]) -> None:
    sequences = [(9, 0), (4, 20), (1, 30)]
    assert_same(Case(sequences, **options))
    if "attn_type" not in options:  # An encoder does not decode.
        assert_same(Case([(1, 20), (1, 30)], **options), decode=True)


def test_a_window_leaves_out_the_keys_before_it() -> None:
    case = Case([(40, 600)], sliding_window_size=9)
    assert computed_pairs(case, NewTokensAttention) == 40 * (40 + 9)


@pytest.mark.parametrize("activation", ["sigmoid", "swish"])
def test_a_gate_that_is_a_part_of_a_projection_gates_the_same(activation: str) -> None:
    rows, heads, channels = 3, 2, 8
    projected = torch.randn(rows, heads * channels + 5)
    gate = projected[:, 5:].view(rows, heads, channels)
    x, weight = torch.randn(rows * heads, channels), torch.randn(channels)
    options: dict[str, Any] = {"x": x, "weight": weight, "activation": activation, "eps": 1e-6}
    strides = (heads, gate.stride(-3), gate.stride(-2))
    output, *_ = _gated_rms_norm(g=gate, g_strided=strides, **options)
    expected, *_ = _gated_rms_norm(g=gate.reshape(-1, channels).contiguous(), **options)
    torch.testing.assert_close(output, expected)
