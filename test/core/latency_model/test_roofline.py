"""The roofline against arithmetic done by hand and figures that the papers publish."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from latency_cases import (
    DEEPSEEK_V3,
    LLAMA_3_1_8B,
    QWEN_3_30B_A3B,
    ROOFLINE,
    error_of,
    measure,
    random_batches,
)

from sglang_coserve.core.latency_model.machine import HARDWARE, find_hardware
from sglang_coserve.core.latency_model.model_shape import ModelShape, find_model
from sglang_coserve.core.latency_model.operators import Attention, kv_bytes_per_token, weight_bytes
from sglang_coserve.core.latency_model.roofline import RooflineModel
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.errors import ConfigError

LLAMA = ModelShape.from_config(LLAMA_3_1_8B)

# Llama-3.1-8B has 8.03 billion parameters; its input embedding is looked up, not read.
LLAMA_WEIGHT_BYTES = 2 * (8.03e9 - 128256 * 4096)


def share_of_memory(device: str) -> float:
    """Of its peak bandwidth, as docs state it."""
    return 0.7 if device in ("h100", "h200") else 0.8


@pytest.mark.parametrize("name", HARDWARE)
def test_one_decode_takes_little_more_than_reading_the_weights(name: str) -> None:
    hardware = HARDWARE[name]
    model = RooflineModel.from_datasheet(LLAMA, hardware)
    read_s = LLAMA_WEIGHT_BYTES / (share_of_memory(name) * hardware.memory_byte_per_s)
    one_decode_s = model.predict(StepStats.of([], [100])) - model.coefficients["decode_step_s"]
    assert one_decode_s == pytest.approx(read_s, rel=0.01)


def test_a_mixture_of_experts_reads_and_computes_those_of_its_tokens() -> None:
    mixture = find_model("mixtral-8x7b")
    h100 = HARDWARE["h100"]
    model = RooflineModel.from_datasheet(mixture, h100, tp_size=2)
    byte_s = 1 / (share_of_memory("h100") * h100.memory_byte_per_s)

    def decode_s(requests: int) -> float:
        return (
            model.predict(StepStats.of([], [10] * requests)) - model.coefficients["decode_step_s"]
        )

    # As its authors publish, it has 46.7e9 parameters, and a token uses 12.9e9.
    assert decode_s(1) == pytest.approx(12.9e9 * byte_s, rel=0.02)
    assert decode_s(32) == pytest.approx(46.7e9 * byte_s, rel=0.02)
    whole = StepStats.of([(8192, 0)])
    one_each = RooflineModel.from_datasheet(replace(mixture, experts_per_token=1), h100, tp_size=2)
    flops = 8192 * 32 * 2 * 3 * 4096 * 14336 / 2  # tokens, layers, multiply-add, matrices, ranks
    assert model.predict(whole) - one_each.predict(whole) == pytest.approx(
        flops * model.coefficients["gemm_flop_s"], rel=0.01
    )


@pytest.mark.parametrize(
    ("config", "parameters", "used", "kv_bytes"),
    [
        # As the authors publish: all parameters, those of a token, KV of a token.
        (QWEN_3_30B_A3B, 30.5e9, 3.3e9, 2 * 2 * 48 * 4 * 128),
        (DEEPSEEK_V3, 671e9, 37e9, 70_272),
    ],
)
def test_sizes_that_authors_publish(
    config: dict[str, Any], parameters: float, used: float, kv_bytes: int
) -> None:
    shape = replace(ModelShape.from_config(config), weights="bf16")
    assert weight_bytes(shape) / 2 == pytest.approx(parameters, rel=0.002)
    experts = replace(shape, num_experts=shape.experts_per_token, experts_per_token=1)
    assert weight_bytes(experts) / 2 == pytest.approx(used, rel=0.015)
    assert kv_bytes_per_token(shape, 1) == kv_bytes


def test_ranks_share_grouped_heads_and_each_keep_latent_vectors() -> None:
    assert kv_bytes_per_token(LLAMA, 4) == kv_bytes_per_token(LLAMA, 1) / 4
    assert kv_bytes_per_token(LLAMA, 16) == kv_bytes_per_token(LLAMA, 8), "one head each"
    deepseek = ModelShape.from_config(DEEPSEEK_V3)
    assert kv_bytes_per_token(deepseek, 8) == kv_bytes_per_token(deepseek, 1)


def test_latent_decodes_multiply_with_vectors_and_prefills_with_heads() -> None:
    deepseek = ModelShape.from_config(DEEPSEEK_V3)
    attention = Attention.of(deepseek, 8)
    heads_and_layers = 128 // 8 * 61
    assert attention.decode_pair_flops == 2 * (512 + 64 + 512) * heads_and_layers
    assert attention.prefill_pair_flops == 2 * (128 + 64 + 128) * heads_and_layers


@pytest.mark.parametrize(
    ("quantization", "share", "faster"),
    [
        ({"quant_method": "fp8"}, 1 / 2, 2.0),
        ({"quant_method": "gptq", "bits": 8}, 1 / 2, 1.0),
        ({"quant_method": "awq", "bits": 4}, 1 / 4, 1.0),
    ],
)
def test_quantized_weights_are_smaller_and_fp8_computes_faster(
    quantization: dict[str, Any], share: float, faster: float
) -> None:
    shape = ModelShape.from_config({**LLAMA_3_1_8B, "quantization_config": quantization})
    embeddings = 2 * 2 * 128256 * 4096
    layers = weight_bytes(LLAMA) - embeddings
    assert weight_bytes(shape) == pytest.approx(embeddings + share * layers)
    h100, a100 = HARDWARE["h100"], HARDWARE["a100"]
    for hardware, factor in ((h100, faster), (a100, 1.0)):
        model = RooflineModel.from_datasheet(shape, hardware)
        plain = RooflineModel.from_datasheet(LLAMA, hardware)
        assert plain.coefficients["gemm_flop_s"] / model.coefficients[
            "gemm_flop_s"
        ] == pytest.approx(factor)


def test_prefill_times_that_conserve_publishes() -> None:
    """ConServe §4.2: Llama-3.1-8B on an H100, a chunk of 2048 tokens."""
    assert ROOFLINE.predict(StepStats.of([(2048, 0)])) == pytest.approx(0.051, rel=0.05)
    assert ROOFLINE.predict(StepStats.of([(2048, 40_000)])) == pytest.approx(0.124, rel=0.05)


def test_batch_size_that_ooco_publishes() -> None:
    """OOCO §3.3.3: on the 910C the GEMMs of Qwen2.5-7B are flat below about 300 rows, not above."""
    model = RooflineModel.from_datasheet(find_model("qwen2.5-7b"), HARDWARE["ascend-910c"])

    def decode_s(requests: int) -> float:
        return model.predict(StepStats.of([], [1] * requests))

    assert decode_s(128) < 1.1 * decode_s(1)
    assert decode_s(600) > 1.8 * decode_s(300)


def test_decode_attention_reads_every_cached_key_once() -> None:
    batch = StepStats.of([], [5000] * 8)
    longer = StepStats.of([], [5000 + 1000] * 8)
    kv_bytes = 8 * 1000 * 2 * 2 * 32 * 8 * 128  # tokens, K and V, bytes, layers, heads, dim
    grown_s = ROOFLINE.predict(longer) - ROOFLINE.predict(batch)
    assert grown_s == pytest.approx(kv_bytes * ROOFLINE.coefficients["attention_byte_s"])


def test_a_mixed_batch_pays_the_larger_overhead_once() -> None:
    slow_prefill = ROOFLINE.with_coefficients({"prefill_step_s": 5e-3, "decode_step_s": 2e-3})
    free = ROOFLINE.with_coefficients({"prefill_step_s": 0.0, "decode_step_s": 0.0})
    prefill, decode = StepStats.of([(64, 0)]), StepStats.of([], [64])
    mixed = StepStats.of([(64, 0)], [64])
    for batch, overhead_s in ((prefill, 5e-3), (decode, 2e-3), (mixed, 5e-3)):
        assert slow_prefill.predict(batch) - free.predict(batch) == pytest.approx(overhead_s)


def test_tensor_parallel_ranks_share_the_work_and_pay_for_talking() -> None:
    chunk = StepStats.of([(4096, 0)])
    one, four = (RooflineModel.from_datasheet(LLAMA, HARDWARE["h100"], tp_size=n) for n in (1, 4))
    silent = four.with_coefficients({"communication_byte_s": 0.0})
    computing_s = silent.predict(chunk) - four.coefficients["prefill_step_s"]
    assert computing_s == pytest.approx(
        (one.predict(chunk) - one.coefficients["prefill_step_s"]) / 4, rel=0.01
    )
    assert four.coefficients["prefill_step_s"] - one.coefficients[
        "prefill_step_s"
    ] == pytest.approx(2 * 32 * 25e-6)
    # 2 all-reduces of 4096 × 4096 bf16 values in 32 layers; a ring moves 2·(4 − 1)/4 of each.
    talk_s = 2 * 32 * 4096 * 4096 * 2 * 1.5 * four.coefficients["communication_byte_s"]
    assert four.predict(chunk) - silent.predict(chunk) == pytest.approx(talk_s)


def test_heads_that_do_not_split_are_refused() -> None:
    with pytest.raises(ConfigError, match="32 attention heads cannot be split over tp_size=3"):
        RooflineModel.from_datasheet(LLAMA, HARDWARE["h100"], tp_size=3)


def test_fit_finds_the_efficiencies_of_a_machine() -> None:
    machine = ROOFLINE.with_coefficients(
        {
            name: value * factor
            for (name, value), factor in zip(
                ROOFLINE.coefficients.items(),
                (1.3, 1.2, 2.0, 1.0, 1.5, 1.0, 4.0, 0.5, 300.0, 20.0),
                strict=True,
            )
        },
    )
    samples = measure(machine, random_batches(4000, seed=1), seed=2)
    fit = ROOFLINE.fit(samples)
    assert error_of(fit.model, machine, random_batches(1000, seed=3)) < 0.005
    assert fit.model.coefficients["gemm_flop_s"] == pytest.approx(
        machine.coefficients["gemm_flop_s"], rel=0.02
    )
    assert fit.model.coefficients["attention_byte_s"] == pytest.approx(
        machine.coefficients["attention_byte_s"], rel=0.02
    )
    assert fit.model.coefficients["prefill_request_s"] == pytest.approx(
        machine.coefficients["prefill_request_s"], rel=0.1
    )
    assert fit.model.coefficients["decode_request_s"] == pytest.approx(
        machine.coefficients["decode_request_s"], rel=0.1
    )


def test_a_few_samples_move_only_what_they_show() -> None:
    machine = ROOFLINE.with_coefficients(
        {"gemm_byte_s": 1.6 * ROOFLINE.coefficients["gemm_byte_s"]}
    )
    samples = measure(machine, random_batches(40, seed=1, prefills=False), seed=2)
    model = ROOFLINE.fit(samples).model
    # Without prefill nothing is known of it, so its cost stays as the datasheet has it.
    assert model.coefficients["prefill_attention_flop_s"] == pytest.approx(
        ROOFLINE.coefficients["prefill_attention_flop_s"]
    )
    assert error_of(model, machine, random_batches(500, seed=3, prefills=False)) < 0.02
    assert error_of(ROOFLINE, machine, random_batches(500, seed=3, prefills=False)) > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "architectures: .*Gemma.* is not one of"),
        ({"architectures": None}, "architectures: None is not one of LlamaForCausalLM"),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 3}},
            "quantization_config: 'awq' is not modelled",
        ),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step: layers with and without experts"),
        ({"use_sliding_window": True}, "use_sliding_window: window attention"),
        ({"hidden_size": "4096"}, "hidden_size: must be a valid integer, found '4096'"),
        ({"vocab_size": 0}, "vocab_size: must be greater than 0, found 0"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: 5 does not divide 32 heads"),
        ({"hidden_size": 16}, "hidden_size: 16 is too small for 32 heads"),
        (
            {"num_experts": 4, "num_experts_per_tok": 8},
            "num_experts_per_tok: 8 is more than the 4 experts",
        ),
        (
            {"num_attention_heads": None},
            "num_attention_heads: .* valid integer, found null",
        ),
    ],
)
def test_models_that_are_not_modelled_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^/models/x/config.json: {message}"):
        ModelShape.from_config({**LLAMA_3_1_8B, **change}, "/models/x/config.json")


def test_optional_dimensions_of_a_config_have_the_usual_defaults() -> None:
    full_heads = {k: v for k, v in LLAMA_3_1_8B.items() if k != "num_key_value_heads"}
    assert ModelShape.from_config(full_heads) == replace(LLAMA, num_kv_heads=32)
    assert LLAMA.head_dim == 128
    assert ModelShape.from_config({**LLAMA_3_1_8B, "head_dim": 64}).head_dim == 64


def test_a_dimension_without_a_default_is_missed_by_its_name() -> None:
    without = {name: value for name, value in LLAMA_3_1_8B.items() if name != "vocab_size"}
    with pytest.raises(ConfigError, match=r"^config.json: vocab_size: this field is missing"):
        ModelShape.from_config(without, "config.json")


def test_unknown_hardware_names_the_known_ones() -> None:
    assert find_hardware("H100") is HARDWARE["h100"]
    with pytest.raises(
        ConfigError, match="'b300': use one of a40, a100, h100, h200, b200, ascend-910c"
    ):
        find_hardware("b300")
