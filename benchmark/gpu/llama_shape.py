"""A folder with the shape of Llama-3.1-8B: configuration and tokenizer, no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from sglang_coserve.small_model import train_tokenizer

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""The published dimensions of Llama-3.1-8B."""

_TRAINED_TOKENS: Final = 2048


def write_llama_shape(folder: Path) -> Path:
    """Write the model to ``folder`` unless it is there; return the folder. For dummy weights.

    The tokenizer has a text for every id of the model: who measures latencies by the
    text that comes would not see tokens without one.
    """
    from transformers import PreTrainedTokenizerFast

    marker = folder / "config.json"
    if marker.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    trained = train_tokenizer(_TRAINED_TOKENS, CONFIG["max_position_embeddings"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_with_filler(trained.backend_tokenizer, CONFIG["vocab_size"]),
        eos_token=trained.eos_token,
        pad_token=trained.pad_token,
        model_max_length=CONFIG["max_position_embeddings"],
    )
    tokenizer.chat_template = trained.chat_template
    assert len(tokenizer) == CONFIG["vocab_size"]
    tokenizer.save_pretrained(folder)
    end = tokenizer.eos_token_id
    config = {**CONFIG, "eos_token_id": end, "pad_token_id": end, "bos_token_id": None}
    marker.write_text(json.dumps(config, indent=2) + "\n")
    return folder


def _with_filler(tokenizer: Any, size: int) -> Any:
    """Return the tokenizer with words up to ``size`` that no merge makes: for decoding only."""
    from tokenizers import Tokenizer

    fields = json.loads(tokenizer.to_str())
    vocabulary = fields["model"]["vocab"]
    # Ġ stands for the space before a word.
    vocabulary |= {f"Ġfiller{number}": number for number in range(len(vocabulary), size)}
    return Tokenizer.from_str(json.dumps(fields))
