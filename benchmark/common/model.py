"""The model that is served, and what the loads must know of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_coserve.small_model import SmallModelSpec, make_small_model
from sglang_coserve.workload import RESERVED_TOKENS

__all__ = ["ServedModel", "prepare_model"]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as the loads see it."""

    path: str
    vocab_size: int
    max_context_tokens: int
    """Longest prompt plus output."""


def prepare_model(path: str | None, work: Path) -> ServedModel:
    """Return the model at ``path``, a folder or a hub name; None makes a small one in ``work``."""
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if path is None:
        path = str(make_small_model(work / "model", SmallModelSpec()))
    config = AutoConfig.from_pretrained(path).get_text_config()
    return ServedModel(
        path, int(config.vocab_size), int(config.max_position_embeddings) - RESERVED_TOKENS
    )
