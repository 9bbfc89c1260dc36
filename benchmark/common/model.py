"""The model that is served, and what the loads must know of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.vision_model import make_vision_model
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


def prepare_model(path: str | None, work: Path, *, takes_pictures: bool = False) -> ServedModel:
    """Return the model at ``path``, a folder or a hub name; None makes a small one in ``work``,
    which ``takes_pictures`` or does not.
    """
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if path is None and takes_pictures:
        path = str(make_vision_model(work / "model"))
    elif path is None:
        path = str(make_small_model(work / "model", SmallModelSpec()))
    config = AutoConfig.from_pretrained(path).get_text_config()
    return ServedModel(
        path, int(config.vocab_size), int(config.max_position_embeddings) - RESERVED_TOKENS
    )
