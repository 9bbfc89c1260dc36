"""Tiny random models of the families that SGLang knows, each as small as one can be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from sglang_coserve.small_model import train_tokenizer

WINDOW_TOKENS = 64
CONTEXT_TOKENS = 1024

_SLIDING = ["sliding_attention", "full_attention"]
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 512,
    "rope_theta": 10000.0,
}

_CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "gpt_oss": {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW_TOKENS,
            "layer_types": _SLIDING * 2,
            "rope_parameters": {**_YARN, "truncate": False},
            "swiglu_limit": 7.0,
        },
        "gemma2": {
            "sliding_window": WINDOW_TOKENS,
            "layer_types": _SLIDING * 2,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
        "gemma3_text": {
            "sliding_window": WINDOW_TOKENS,
            "layer_types": _SLIDING * 2,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True,
        },
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        "qwen3_moe": {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        },
        "deepseek_v3": {
            "kv_lora_rank": 32,
            "q_lora_rank": 48,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        "qwen3_next": {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "decoder_sparse_step": 1,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "full_attention_interval": 2,
        },
        "lfm2": {
            "block_ff_dim": 128,
            "conv_L_cache": 3,
            "layer_types": ["conv", "full_attention"] * 2,
        },
    }
)


def make_family_model(directory: Path, family: str) -> Path:
    """Write a model of four layers with tokenizer to ``directory``; return that."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = train_tokenizer(2048, CONTEXT_TOKENS)
    end = int(tokenizer.eos_token_id)
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": CONTEXT_TOKENS,
            "tie_word_embeddings": False,
            "eos_token_id": end,
            "bos_token_id": end,
            "pad_token_id": end,
            "dtype": "float32",
            **_CONFIGS[family],
        },
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    is_gemma = family.startswith("gemma")
    # Gemma multiplies its embeddings.
    embedding_std = config.hidden_size**-0.5 if is_gemma else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.normal_(0.0, embedding_std, generator=generator)
            elif parameter.dim() >= 2 and "conv" not in name:
                std = 2.0 / parameter.shape[-1] ** 0.5
                parameter.normal_(0.0, std, generator=generator)
            elif is_gemma and name == "model.norm.weight":
                # It adds 1 to it, and its head is the embedding: with half of the signs turned
                # around, a token does not follow itself for ever.
                parameter.bernoulli_(0.5, generator=generator).mul_(-2.0)
            elif "bias" in name or "sinks" in name:
                parameter.normal_(0.0, 0.1, generator=generator)
                # SGLang keeps sinks with this precision.
                parameter.copy_(parameter.to(torch.bfloat16))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    _say_as_published(directory / "config.json", family)
    return directory


def _say_as_published(path: Path, family: str) -> None:
    """Write what SGLang reads where published models have it, and transformers no longer does."""
    config = json.loads(path.read_text())
    if family == "deepseek_v3":
        parameters = config["rope_parameters"]
        config["rope_scaling"] = {**parameters, "type": "yarn"}
        config["rope_theta"] = parameters["rope_theta"]
    if family == "gemma2":
        config["hidden_act"] = "gelu_pytorch_tanh"
    path.write_text(json.dumps(config))
