"""What the numbers in a request may be: one table and one check, at whatever door they come in.

A number that a client gives is inverted, taken the logarithm of, rounded to 32 bits or sorted by
somewhere in the engine, so each has a least value, too, not only a greatest.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Final, NamedTuple

from sglang_coserve.errors import RequestError


class Bound(NamedTuple):
    """The values that a field may have, both ends included."""

    least: float
    most: float
    unit: str = ""
    is_whole: bool = False
    """Only whole numbers."""


_INT32: Final = 2**31 - 1

PARAM_BOUNDS: Final[Mapping[str, Bound]] = {
    # As 32-bit floats, smaller values become zero and larger ones may become infinite.
    "temperature": Bound(0, 1e9),
    "top_p": Bound(1.2e-38, 1),
    "min_p": Bound(0, 1),
    "frequency_penalty": Bound(-2, 2),
    "presence_penalty": Bound(-2, 2),
    # Logits are divided by it, and must stay finite.
    "repetition_penalty": Bound(1e-3, 2),
    # The engine's integers have 32 bits, and 64 for the seed.
    "top_k": Bound(-1, _INT32, is_whole=True),
    "min_new_tokens": Bound(0, _INT32, is_whole=True),
    "max_new_tokens": Bound(0, _INT32, is_whole=True),
    "sampling_seed": Bound(-(2**63), 2**63 - 1, is_whole=True),
    # Output tokens are counted modulo this.
    "stream_interval": Bound(1, _INT32, is_whole=True),
    # The limit of OpenAI; SGLang holds all choices at once.
    "n": Bound(1, 128, is_whole=True),
}
"""Sampling parameters, under SGLang's names."""

FIELD_BOUNDS: Final[Mapping[str, Bound]] = {
    # Offline requests get a priority below all of these.
    "priority": Bound(-(2**31), _INT32, is_whole=True),
    "max_thinking_tokens": Bound(0, _INT32, is_whole=True),
    # Each becomes a Python object in three processes, while other requests wait.
    "top_logprobs_num": Bound(0, 1024, is_whole=True),
    "logprob_start_len": Bound(-1, _INT32, is_whole=True),
    "routed_experts_start_len": Bound(0, _INT32, is_whole=True),
    "routed_dp_rank": Bound(0, _INT32, is_whole=True),
    "data_parallel_rank": Bound(0, _INT32, is_whole=True),
    "disagg_prefill_dp_rank": Bound(0, _INT32, is_whole=True),
    "decode_tp_size": Bound(1, _INT32, is_whole=True),
    "bootstrap_port": Bound(0, 2**16 - 1, is_whole=True),
    "bootstrap_room": Bound(0, 2**63 - 1, is_whole=True),
    "received_time": Bound(0, 1e12),
    # Tiles of a picture, each as costly as a small picture; SGLang's models have 12 by themselves.
    "min_dynamic_patch": Bound(1, 128, is_whole=True),
    "max_dynamic_patch": Bound(1, 128, is_whole=True),
    "image_max_dynamic_patch": Bound(1, 128, is_whole=True),
    "video_max_dynamic_patch": Bound(1, 128, is_whole=True),
}
"""Other fields of SGLang's requests."""


def check_number(name: str, value: object, bound: Bound) -> None:
    """Check the value of the field ``name``, which must not be null.

    Raises:
        RequestError: it is no number, or out of bounds.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    is_within = is_number and bound.least <= value <= bound.most  # type: ignore[operator]
    if is_within and not (bound.is_whole and value % 1):  # type: ignore[operator]
        return
    number = "a whole number" if bound.is_whole else "a number"
    of = f" of {bound.unit}" if bound.unit else ""
    ends = f"{_told(bound.least)} to {_told(bound.most)}"
    raise RequestError(f"{name} is {excerpt(value)}: use {number}{of}, {ends}")


def excerpt(value: object) -> str:
    """Return the text of a value for an error message, in at most 41 characters."""
    # Python refuses to convert a huge integer to decimal digits.
    text = hex(value) if isinstance(value, int) and abs(value) > 2**70 else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _told(end: float) -> str:
    return str(end) if isinstance(end, int) else f"{end:g}"
