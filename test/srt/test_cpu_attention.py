"""Our attention on CPUs against SGLang's own, on SGLang's pools, layers and call path."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from sglang_coserve.srt.cpu import defaults as cpu

cpu.set_environment_defaults()  # Before SGLang is imported.

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402

from sglang_coserve.srt.cpu.attention import NewTokensAttention, install_attention  # noqa: E402

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
        output = forward(*self.qkv, self.layer, self.batch, save_kv_cache=saves)
        assert isinstance(output, torch.Tensor)
        return output


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
    seed=st.integers(0),
)
def test_extend_agrees_with_sglang(
    sequences: Sequences, kv_heads: int, sharing_heads: int, seed: int
) -> None:
    assert_same(Case(sequences, kv_heads=kv_heads, sharing_heads=sharing_heads, seed=seed % 2**63))


@settings(deadline=None)
@given(
    contexts=st.lists(st.integers(0, 100), min_size=1, max_size=8),
    kv_heads=st.integers(1, 3),
    sharing_heads=st.integers(1, 4),
)
def test_decode_agrees_with_sglang(contexts: list[int], kv_heads: int, sharing_heads: int) -> None:
    sequences = [(1, context) for context in contexts]
    assert_same(Case(sequences, kv_heads=kv_heads, sharing_heads=sharing_heads), decode=True)


def test_a_cache_of_another_type_is_converted() -> None:
    case = Case([(9, 0), (4, 20), (1, 30)], kv_dtype=torch.bfloat16)
    assert_same(case)


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


@settings(deadline=None)
@given(sequences=SEQUENCES, window=st.integers(0, 300), seed=st.integers(0, 9))
def test_a_window_agrees_with_sglang(sequences: Sequences, window: int, seed: int) -> None:
    assert_same(Case(sequences, sliding_window_size=window, seed=seed))
    decodes = [(1, context) for _, context in sequences]
    assert_same(Case(decodes, sliding_window_size=window, seed=seed), decode=True)


def test_a_window_leaves_out_the_keys_before_it() -> None:
    case = Case([(40, 600)], sliding_window_size=9)
    assert computed_pairs(case, NewTokensAttention) == 40 * (40 + 9)


def written_out(case: Case, sequences: Sequences, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return what attention is, token by token."""
    layer, table = case.layer, case.runner.req_to_token_pool.req_to_token
    keys, values = case.kv.get_key_buffer(0), case.kv.get_value_buffer(0)
    query = case.qkv[0].unflatten(1, (layer.tp_q_head_num, HEAD_DIM))
    sharing_heads = layer.tp_q_head_num // layer.tp_k_head_num
    outputs, token = [], 0
    for row, (new, cached) in enumerate(sequences, start=1):
        for position in range(cached, cached + new):
            first = max(0, position - layer.sliding_window_size)
            first = 0 if layer.sliding_window_size < 0 else first
            slots = table[row, first : position + 1].long()
            key = keys[slots].repeat_interleave(sharing_heads, dim=1)
            value = values[slots].repeat_interleave(sharing_heads, dim=1)
            logits = torch.einsum("hd,khd->hk", query[token], key) * SCALING
            if layer.logit_cap:
                logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
            if sinks is not None:
                logits = torch.cat([logits, sinks[:, None]], dim=1)
            shares = logits.softmax(dim=1)[:, : len(slots)]
            outputs.append(torch.einsum("hk,khd->hd", shares, value).flatten())
            token += 1
    return torch.stack(outputs)


@pytest.mark.parametrize("window", [-1, 7, 100])
@pytest.mark.parametrize(("logit_cap", "has_sinks"), [(0.5, False), (0.0, True), (0.5, True)])
def test_caps_of_logits_and_sinks(window: int, logit_cap: float, has_sinks: bool) -> None:
    options = {"sliding_window_size": window, "logit_cap": logit_cap}
    for sequences, decode in (([(9, 0), (300, 20), (1, 30)], False), ([(1, 0), (1, 30)], True)):
        case = Case(sequences, **options)
        sinks = torch.randn(case.layer.tp_q_head_num) if has_sinks else None
        case.run(NewTokensAttention, decode=decode)  # Writes the new keys and values.
        made = NewTokensAttention(case.runner)
        forward = made.forward_decode if decode else made.forward_extend
        output = forward(*case.qkv, case.layer, case.batch, sinks=sinks)
        expected = written_out(case, sequences, sinks)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_kv_of_a_window_is_read_from_its_own_pool() -> None:
    """Each slot of the pool of whole contexts has its own in the smaller one."""
    sequences = [(9, 0), (40, 20), (1, 30)]
    case, plain = (Case(sequences, sliding_window_size=12, seed=3) for _ in range(2))
    plain_output = plain.run(NewTokensAttention, decode=False)
    pool = SWAKVPool(
        size=KV_TOKENS,
        size_swa=KV_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=torch.float32,
        head_num=2,
        head_dim=HEAD_DIM,
        swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1],
        device="cpu",
    )
    mapping = torch.cat([torch.arange(KV_TOKENS + PAGE_TOKENS).flip(0), torch.tensor([-1])])
    pool.register_mapping(mapping)
    for name in ("k_buffer", "v_buffer"):
        getattr(pool.swa_kv_pool, name)[0][mapping[:-1]] = getattr(case.kv, name)[0]
    case.runner.token_to_kv_pool = pool
    made = NewTokensAttention(case.runner)
    made.init_forward_metadata(case.batch)
    output = made.forward_extend(*case.qkv, case.layer, case.batch)
    torch.testing.assert_close(output, plain_output)


def test_it_is_what_the_engine_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTION_BACKENDS, "torch_native", None)
    install_attention()
    made = ATTENTION_BACKENDS["torch_native"](Case([(1, 0)]).runner)
    assert isinstance(made, NewTokensAttention)
