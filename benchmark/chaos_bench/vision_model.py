"""A tiny random model that takes pictures, and pictures for it."""

from __future__ import annotations

import base64
import io
import random
from pathlib import Path
from typing import Final

from sglang_coserve.small_model import draw_weights, train_tokenizer

_CONTEXT_TOKENS: Final = 1024
_PICTURE_TOKENS: Final = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_PATCH_PIXELS: Final = 28
"""Width and height of what becomes one token."""

_MOST_PATCHES: Final = 4


def make_vision_model(directory: Path) -> Path:
    """Write a Qwen2.5-VL of two layers, with tokenizer and processors; return ``directory``."""
    import torch
    from transformers import (
        AutoConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer = train_tokenizer(2048, _CONTEXT_TOKENS)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_PICTURE_TOKENS)})
    tokenizer.chat_template = _TEMPLATE
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(_PICTURE_TOKENS))
    eos = int(tokenizer.eos_token_id)
    ends = {"eos_token_id": eos, "bos_token_id": eos, "pad_token_id": eos, "dtype": "float32"}
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": _CONTEXT_TOKENS,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [2, 3, 3],
                "rope_theta": 10000.0,
            },
            **ends,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
        **ends,
    )
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    draw_weights(model, tokenizer, seed=0)
    model.save_pretrained(directory)
    Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            min_pixels=_PATCH_PIXELS**2, max_pixels=_MOST_PATCHES**2 * _PATCH_PIXELS**2
        ),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=_TEMPLATE,
    ).save_pretrained(directory)
    return directory


def random_picture(rng: random.Random) -> str:
    """Return a ``data:`` URL of a picture that no other draw is likely to give."""
    from PIL import Image

    width, height = rng.randint(1, _MOST_PATCHES), rng.randint(1, _MOST_PATCHES)
    colours = Image.frombytes("RGB", (2 * width, 2 * height), rng.randbytes(12 * width * height))
    content = io.BytesIO()
    size = (width * _PATCH_PIXELS, height * _PATCH_PIXELS)
    colours.resize(size, Image.Resampling.NEAREST).save(content, "PNG")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()
