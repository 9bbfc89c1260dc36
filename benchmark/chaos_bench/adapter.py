"""Random LoRA adapters of a small model, strong enough to change every output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

RANK: Final = 4
MODULES: Final = ("q_proj", "k_proj", "v_proj", "o_proj")


def make_adapter(model: Path, directory: Path, seed: int = 0) -> Path:
    """Write an adapter of the attention of the model in ``model``; return ``directory``."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if not name.endswith(tuple(f"{module}.weight" for module in MODULES)):
            continue
        key = f"base_model.model.{name.removesuffix('.weight')}"
        rows, columns = weight.shape
        down = torch.randn((RANK, columns), generator=generator) / columns**0.5
        tensors[f"{key}.lora_A.weight"] = down
        tensors[f"{key}.lora_B.weight"] = torch.randn((rows, RANK), generator=generator)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    config_text = json.dumps({**config, "target_modules": MODULES})
    (directory / "adapter_config.json").write_text(config_text)
    return directory
