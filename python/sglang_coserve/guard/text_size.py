"""Bounds the text that is tokenized at once, where every route spends memory on it.

A tokenizer takes 300 bytes of memory for each character while it works, and 2 s for each MiB. A
body for a multimodal model may have 64 MiB, because images are in it as base64, so one text of that
size would end the server.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

_ENCODE: Final = "_encode_plus"
"""The method by which tokenizers of transformers encode texts, whichever method was called."""


_unbounded: dict[type, Callable[..., Any]] = {}
"""The methods of the classes that have a bound."""


def bound_texts(tokenizer: Any, most_chars: Callable[[], int]) -> None:
    """Have all tokenizers of the class of ``tokenizer`` in this process refuse long texts.

    They raise a ``ValueError``, which SGLang's routes answer with 400. Does nothing for tokenizers
    that are not of transformers. The last limit counts.

    Args:
        tokenizer: One of the tokenizers, or None.
        most_chars: Returns the most characters of texts that are tokenized at once.
    """
    for kind in type(tokenizer).__mro__:
        encode = vars(kind).get(_ENCODE)
        if encode is not None:
            unbounded = _unbounded.setdefault(kind, encode)
            setattr(kind, _ENCODE, _bounded(unbounded, most_chars))
            return


def _bounded(encode: Callable[..., Any], most_chars: Callable[[], int]) -> Callable[..., Any]:
    @wraps(encode)
    def encode_short(self: Any, text: Any, *arguments: Any, **named: Any) -> Any:
        num_chars, most = _num_chars(text), most_chars()
        if num_chars > most:
            raise ValueError(
                f"the text has {num_chars:,} characters: one request may have {most:,}, more than "
                "the context of the model holds: send less"
            )
        return encode(self, text, *arguments, **named)

    return encode_short


def _num_chars(text: Any) -> int:
    """Return the characters of a text, or of a list of texts or pairs of texts."""
    if isinstance(text, str):
        return len(text)
    return sum(map(_num_chars, text)) if isinstance(text, list | tuple) else 0
