"""Makes a small random-weight model with tokenizer and chat template.

Demo, tests and CPU benchmarks need a model where nothing can be downloaded.  A
freshly initialised transformer is a poor one: its logits hang on the last token
alone, so it soon repeats one token and would hide an error in the KV cache.  Here
embeddings have unit variance and every projection a gain of two, so that
attention, hence the whole context, decides each token.  Tokens that are no text by
themselves are never chosen: a server holds one back until the next completes it,
and who measures latencies by the text that comes would see two steps as one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_coserve.errors import ConfigError, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_PROJECTION_GAIN = 2.0
_SPECIAL_TOKENS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class SmallModelSpec:
    """Shape of the model to make."""

    architecture: str = "llama"
    """One of ``ARCHITECTURES``."""

    hidden: int = 256
    """Width of the residual stream; a multiple of ``heads``, the quotient even (rotary)."""

    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    """Divides ``heads``."""

    vocab: int = 2048
    """Upper bound of the tokenizer's vocabulary."""

    context: int = 4096
    """Longest prompt plus output, in tokens."""

    seed: int = 0

    def __post_init__(self) -> None:
        """Check what ``coserve make-model`` is told.

        Raises:
            ConfigError: no model can have it.
        """
        if self.context < 1:
            raise ConfigError(f"context must be at least 1, got {self.context}")
        if self.vocab < 512:
            raise ConfigError(
                f"vocab must be at least 512 (256 bytes and merges), got {self.vocab}"
            )


def make_small_model(directory: Path, spec: SmallModelSpec) -> Path:
    """Write config, weights (fp32), tokenizer and chat template to ``directory``.

    The same spec gives the same files. Returns ``directory``.

    Raises:
        ConfigError: ``directory`` holds another model.
        MissingExtraError: torch or transformers is not installed.
    """
    require("engine", "a small model")
    directory.mkdir(parents=True, exist_ok=True)
    marker = directory / "small_model.json"
    if (directory / "config.json").exists() and not marker.exists():
        raise ConfigError(f"{directory} already holds another model: choose an empty directory")
    tokenizer = train_tokenizer(spec.vocab, spec.context)
    tokenizer.save_pretrained(directory)
    model = _build_model(spec, vocab=len(tokenizer), end_id=int(tokenizer.eos_token_id))
    draw_weights(model, tokenizer, spec.seed)
    with _silent():
        model.save_pretrained(directory)
    fields = {name: getattr(spec, name) for name in spec.__slots__}
    marker.write_text(json.dumps(fields, indent=2) + "\n")
    return directory


@contextmanager
def _silent() -> Iterator[None]:
    """Within it, Hugging Face's progress bars are off: this takes no time."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def train_tokenizer(vocab: int, context: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of at most ``vocab`` tokens, trained on the bundled prompts.

    No text is out of its vocabulary. It has a chat template, and the same arguments
    give the same tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|end|>",
        model_max_length=context,
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def _corpus() -> Iterator[str]:
    sample = resources.files("sglang_coserve") / "data" / "offline_sample.jsonl"
    for line in sample.read_text(encoding="utf-8").splitlines():
        yield from _strings(json.loads(line)["body"])


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def draw_weights(model: Any, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Draw weights with which the whole context decides each token, and each token is text.

    ``model`` must not tie its embeddings. The same arguments give the same weights.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                is_embedding = "embed_tokens" in name
                std = 1.0 if is_embedding else _PROJECTION_GAIN / parameter.shape[1] ** 0.5
                parameter.normal_(0.0, std, generator=generator)
        # A logit of 0, where the largest of all others is far above it.
        model.get_output_embeddings().weight[tokens_without_text(tokenizer)] = 0.0


def tokens_without_text(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the ids of parts of characters and of roles; the end of a text is not among them."""
    silent = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    silent.discard(int(tokenizer.eos_token_id))
    return [
        token
        for token in range(len(tokenizer))
        if token in silent or "\ufffd" in tokenizer.decode([token])
    ]


def _build_model(spec: SmallModelSpec, vocab: int, end_id: int) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        spec.architecture,
        vocab_size=vocab,
        hidden_size=spec.hidden,
        # The 2.75 of Llama, rounded to what vectorised kernels like.
        intermediate_size=max(16, spec.hidden * 11 // 4 // 16 * 16),
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.hidden // spec.heads,
        max_position_embeddings=spec.context,
        tie_word_embeddings=False,
        eos_token_id=end_id,
        bos_token_id=None,
        pad_token_id=end_id,
        dtype="float32",
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
