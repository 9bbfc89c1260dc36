"""Checks requests for values that SGLang accepts but that crash or stop its processes.

One such request could end the server for all users, and a line of a batch would do so again after
each restart, since batches are resumed. So every request to the scheduler is checked here,
whatever its entry point.

A number that a client gives is inverted, taken the logarithm of, rounded to 32 bits or sorted by
somewhere in the engine, so each has a least value, too, not only a greatest.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Final, NamedTuple

import numpy

from sglang_coserve.errors import RequestError
from sglang_coserve.guard.stop_patterns import check_stop_patterns


class Bound(NamedTuple):
    """The values that a field may have, both ends included."""

    least: float
    most: float
    unit: str = ""
    is_whole: bool = False
    """Only whole numbers."""


_INT32: Final = 2**31 - 1

_MOST_LOGPROBS: Final = 1024
"""Log-probabilities of one position: each becomes a Python object in three processes, while other
requests wait."""

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
    "top_logprobs_num": Bound(0, _MOST_LOGPROBS, is_whole=True),
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


_MOST_REQUESTS: Final = 2048
"""Engine requests from one body, where each choice counts: the limit of inputs in OpenAI's
embeddings."""

_MOST_ID_CHARS: Final = 256

_HEALTH_CHECK_ID: Final = "HEALTH_CHECK"
"""SGLang does not answer a request with this id prefix while others run."""

_MOST_BIAS: Final = 1e30
"""Fits the engine's 32-bit floats, with room for the logit that it is added to."""

_MOST_BIASES: Final = 1024
"""SGLang writes biases one by one, a few microseconds each, whenever a request joins a batch."""

_MOST_STOPS: Final = 128
_MOST_STOP_CHARS: Final = 4096
"""SGLang searches for each stop string after every token, while all other requests wait."""

_SERVER_FIELDS: Final = ("lora_id", "http_worker_ipc", "mm_data_mooncake", "encoder_urls")
"""Fields of SGLang's request that only SGLang itself may set."""

_SERVER_PARAMS: Final = (
    *("is_normalized", "stop_strs", "stop_str_max_len", "stop_regex_strs", "stop_regex_max_len"),
)
"""Sampling parameters that only SGLang itself may set."""


def check_request(request: Any, *, is_health_check: bool = False) -> None:
    """Check a ``GenerateReqInput`` or ``EmbeddingReqInput`` before SGLang processes it.

    SGLang makes a separate engine request of every prompt and choice. O(stop conditions).

    Raises:
        RequestError: a number is out of its bounds.
        ValueError: it would become too many engine requests, has an invalid id or stop
            condition, or fields that clients may not set.
    """
    for name in _SERVER_FIELDS:
        if getattr(request, name, None) is not None:
            raise ValueError(f"{name} is set by the server only: leave it out")
    if not is_health_check:
        _check_ids(request.rid)
    for name, bound in FIELD_BOUNDS.items():
        value = getattr(request, name, None)
        for one in value if isinstance(value, list) else [value]:
            if one is not None:
                check_number(name, one, bound)
    given = request.sampling_params
    num_choices = 1
    patterns: dict[str, None] = {}
    for params in given if isinstance(given, list) else [given or {}]:
        num_choices = params.get("n", 1)
        check_number("n", num_choices, PARAM_BOUNDS["n"])
        for name, bound in PARAM_BOUNDS.items():
            if params.get(name) is not None:
                check_number(name, params[name], bound)
        for name in _SERVER_PARAMS:
            if name in params:
                raise ValueError(f"{name} is set by the server only: leave it out")
        if params.get("beam_width") not in (None, 1):
            # SGLang has it since 0.5.22; its requests cannot be planned, paused or retracted here.
            raise ValueError("beam search is not co-served: leave beam_width out, or use 1")
        patterns |= dict.fromkeys(_checked_stops(params, "stop_regex"))
        _checked_stops(params, "stop")
    check_stop_patterns(patterns)
    num_requests = num_choices * _num_prompts(request)
    if num_requests > _MOST_REQUESTS:
        raise ValueError(
            f"{num_requests} prompts and choices in one request: use at most {_MOST_REQUESTS}"
        )


def check_values(request: Any, vocab_size: int, given_ids: Sequence[int] | None) -> None:
    """Check a request that SGLang has tokenized, and whose fields have the right types.

    ``given_ids`` are the token ids of the prompt as the client gave them, if it did: those of a
    request with images or sounds have placeholders by now, outside of the vocabulary on purpose.

    Stop tokens outside of the vocabulary are dropped, since they never match: another
    request's ``min_new_tokens`` would make the engine look them up. O(prompt tokens).

    Raises:
        ValueError: it has no token, token ids outside the vocabulary, or values out of range.
    """
    if request.input_ids is not None and len(request.input_ids) == 0:
        raise ValueError("the prompt is empty: use at least one token")
    prompt = request.input_ids if request.mm_inputs is None else given_ids
    _check_token_ids("prompt", array("q", prompt or ()), vocab_size)
    params = request.sampling_params
    if params.stop_token_ids:
        if params.min_new_tokens:
            _check_token_ids("stop_token_ids", array("q", params.stop_token_ids), vocab_size)
        known = {token for token in params.stop_token_ids if 0 <= token < vocab_size}
        params.stop_token_ids = known or None
    biases, scored = params.logit_bias or {}, getattr(request, "token_ids_logprob", None) or ()
    for name, count, most in (
        ("logit_bias", len(biases), _MOST_BIASES),
        ("token_ids_logprob", len(scored), _MOST_LOGPROBS),
    ):
        if count > most:
            raise ValueError(f"{name} has {count} tokens: use at most {most}")
    for token, bias in biases.items():
        if not -_MOST_BIAS <= bias <= _MOST_BIAS:
            raise ValueError(f"the logit_bias of {token} is {bias!r}: use -100 to 100")
    if (asked := getattr(request, "top_logprobs_num", 0)) > vocab_size:
        raise ValueError(f"{asked} top logprobs: use 0 to {vocab_size}")


def _check_ids(rid: Any) -> None:
    for one in rid if isinstance(rid, list) else [rid]:
        if one is None:
            continue
        if not isinstance(one, str) or not 1 <= len(one) <= _MOST_ID_CHARS:
            raise ValueError(f"rid is {excerpt(one)}: use 1 to {_MOST_ID_CHARS} characters")
        if one.startswith(_HEALTH_CHECK_ID):
            raise ValueError(f"rid is {excerpt(one)}: use one that is not for health checks")


def _checked_stops(params: Mapping[str, Any], name: str) -> Sequence[str]:
    """Return the entries of ``stop`` or ``stop_regex``, of which there may be so many."""
    given = params.get(name)
    stops = given if isinstance(given, list) else [] if given is None else [given]
    if len(stops) > _MOST_STOPS:
        raise ValueError(f"{name} has {len(stops)} entries: use at most {_MOST_STOPS}")
    for stop in stops:
        if not isinstance(stop, str):
            raise ValueError(f"{name} is {excerpt(stop)}: use text, or a list of texts")
        if len(stop) > _MOST_STOP_CHARS:
            raise ValueError(f"{name} has {len(stop)} characters: use at most {_MOST_STOP_CHARS}")
    return stops


def _num_prompts(request: Any) -> int:
    for name in ("text", "input_ids", "input_embeds"):
        prompts = getattr(request, name, None)
        if isinstance(prompts, list):
            # SGLang tells one prompt from several by its first token: an id, or a vector.
            token = prompts[0] if prompts else None
            if name == "input_embeds" and isinstance(token, list) and token:
                is_single = isinstance(token[0], float)
            else:
                is_single = isinstance(token, int)
            return 1 if is_single else len(prompts)
        if prompts is not None:
            return 1
    return 1


def _check_token_ids(name: str, token_ids: array[int], vocab_size: int) -> None:
    ids = numpy.frombuffer(token_ids, numpy.int64)  # 100,000 of them in 0.1 ms, without a copy.
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise ValueError(f"{name}: token ids of this model are 0 to {vocab_size - 1}")
