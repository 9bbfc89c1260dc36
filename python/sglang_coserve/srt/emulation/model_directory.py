"""The model directory of an emulation, and what serves it."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from sglang_coserve.errors import ConfigError, require
from sglang_coserve.small_model import SmallModelSpec, tokens_without_text, train_tokenizer
from sglang_coserve.srt.cpu import defaults as cpu
from sglang_coserve.srt.emulation.settings import PLACES, Emulation

CONTEXT_TOKENS: Final = 32768
"""The usual longest prompt plus output. SGLang's table of requests has a row of so many places for
each that may run, and the host's memory takes it."""

_WIDTH: Final = 16
"""Of the residual stream: enough that outputs vary, and little work."""

_MAX_REQUESTS: Final = 2048
"""SGLang's own least ``--max-running-requests`` on a GPU; its table of them takes memory here."""

_ENVIRONMENT: Final = {
    "CUDA_VISIBLE_DEVICES": "",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_coserve.srt.emulation",
    # On CUDA it is always on.
    "SGLANG_ENABLE_WAR_BARRIER": "1",
}
"""What SGLang must find when it is first imported."""


def make_emulated_model(directory: Path, emulation: Emulation, *, vocab: int, context: int) -> Path:
    """Write config, small weights, tokenizer and SGLang's flags to ``directory``; return it.

    ``vocab`` is an upper bound of the tokenizer's vocabulary (the emulated one only takes time),
    ``context`` the longest prompt plus output, in tokens.

    Raises:
        ConfigError: ``directory`` holds another model, or no model can have this context or
            vocabulary.
        MissingExtraError: torch or transformers is not installed.
    """
    require("engine", "an emulated model")
    SmallModelSpec(vocab=vocab, context=context)  # Which checks them.
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "config.json"
    if config.exists() and read_emulation(directory) is None:
        raise ConfigError(f"{directory} already holds another model: choose an empty directory")
    tokenizer = train_tokenizer(vocab, context)
    tokenizer.save_pretrained(directory)
    end = int(tokenizer.eos_token_id)
    values = {
        "architectures": ["EmulatedForCausalLM"],
        "model_type": "llama",
        "emulation": asdict(emulation),
        "num_hidden_layers": emulation.num_layers,
        "hidden_size": _WIDTH,
        "intermediate_size": _WIDTH,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": context,
        "eos_token_id": end,
        "pad_token_id": end,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    _write_weights(directory / "model.safetensors", tokenizer, emulation.seed)
    flags = {"model-path": str(directory.resolve()), **flag_defaults(emulation)}
    _write_flags(directory / "server.yaml", flags)
    return directory


def _write_weights(path: Path, tokenizer: Any, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    rows = {"embed_tokens": len(tokenizer), "embed_places": PLACES, "lm_head": len(tokenizer)}
    weights = {
        f"{name}.weight": torch.randn(count, _WIDTH, generator=generator)
        for name, count in rows.items()
    }
    # Their logit is 0, where the largest of all others is above it.
    weights["lm_head.weight"][tokens_without_text(tokenizer)] = 0.0
    save_file(weights, path, metadata={"format": "pt"})


def _write_flags(path: Path, flags: dict[str, Any]) -> None:
    lines = [f"{name.replace('_', '-')}: {json.dumps(value)}" for name, value in flags.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_emulation(directory: Path) -> Emulation | None:
    """Return what a model directory emulates; None if it holds another model, or none.

    Raises:
        InputFileError: what it says is malformed.
        ConfigError: it is out of range.
    """
    path = directory / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8")).get("emulation")
    except (OSError, ValueError, AttributeError):
        return None
    return None if values is None else Emulation.from_mapping(values, f"{path}: emulation")


def set_environment_defaults() -> None:
    """Set what SGLang reads when it is first imported; children inherit it."""
    os.environ.update(_ENVIRONMENT)
    cpu.set_environment_defaults()


def flag_defaults(emulation: Emulation) -> dict[str, Any]:
    """Return the fields of ``ServerArgs`` with which a server has the GPU's limits."""
    return {
        **cpu.FLAG_DEFAULTS,
        "disable_overlap_schedule": False,
        "served_model_name": emulation.name,
        "max_total_tokens": emulation.kv_tokens,
        "chunked_prefill_size": emulation.chunk_tokens,
        "max_running_requests": _MAX_REQUESTS,
    }


def stock_command(directory: Path) -> str:
    """Return the command by which stock SGLang serves a model directory."""
    variables = " ".join(f"{name}={value}" for name, value in _ENVIRONMENT.items())
    config = shlex.quote(str(directory.resolve() / "server.yaml"))
    return f"{variables} python -m sglang.launch_server --config {config}"
