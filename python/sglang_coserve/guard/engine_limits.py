"""Checks requests for values that SGLang accepts but that crash or stop its processes.

One such request could end the server for all users, and a line of a batch would do so again after
each restart, since batches are resumed. So every request to the scheduler is checked here,
whatever its entry point.

A number that a client gives is inverted, taken the logarithm of, rounded to 32 bits or sorted by
somewhere in the engine, so each has a least value, too, not only a greatest.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Final, NamedTuple

import numpy

from sglang_coserve.errors import RequestError
from sglang_coserve.guard.request_fields import (
    FIELDS,
    MOST_LOGPROBS,
    OPTION,
    OPTIONS,
    PARAMS,
    Rule,
)
from sglang_coserve.guard.sizes import add_logprobs
from sglang_coserve.guard.stop_patterns import check_stop_patterns
from sglang_coserve.number_bounds import Bound, check_number, excerpt


def check_options(name: str, value: object) -> None:
    """Check the numbers among options of a media processor, which are JSON. O(options).

    Raises:
        RequestError: one is out of its bounds.
    """
    if isinstance(value, Mapping):
        for key, one in value.items():
            check_options(key, one)
    elif isinstance(value, list):
        for one in value:
            check_options(name, one)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        check_number(name[:64], value, OPTIONS.get(name, OPTION))


_OF_PROCESSORS: Final = ("video_config", "images_config", "mm_processor_kwargs")
"""Fields with options for media processors."""

_MEDIA: Final = ("image_data", "video_data", "audio_data")

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


def check_request(
    request: Any, *, given_by_client: bool = True, is_health_check: bool = False
) -> None:
    """Check a ``GenerateReqInput`` or ``EmbeddingReqInput`` before SGLang processes it.

    ``given_by_client`` is whether a client may have set any of its fields. Other requests were made
    by SGLang's own handlers, which set ``Rule.SERVER`` fields, too. SGLang makes a separate engine
    request of every prompt and choice. O(fields + stop conditions).

    Raises:
        RequestError: a field may not be set, or a number is out of its bounds.
        ValueError: it would become too many engine requests, or has an invalid id or stop
            condition.
    """
    for name, value in _set_fields(request):
        rule = FIELDS.get(name)
        _check_rule(name, rule, given_by_client=given_by_client)
        if isinstance(rule, Bound):
            for one in value if isinstance(value, list) else [value]:
                if one is not None:
                    check_number(name, one, rule)
        elif name in _OF_PROCESSORS:
            check_options(name, value)
        elif name in _MEDIA and given_by_client:
            _check_files(name, value)
    if not is_health_check:
        _check_ids(request.rid)
    given = request.sampling_params
    num_choices = 1
    patterns: dict[str, None] = {}
    for params in given if isinstance(given, list) else [given or {}]:
        for name, value in params.items():
            rule = PARAMS.get(name)
            _check_rule(name, rule, given_by_client=given_by_client)
            # SGLang counts the choices before it replaces a null.
            if isinstance(rule, Bound) and (value is not None or name == "n"):
                check_number(name, value, rule)
        num_choices = params.get("n", 1)
        if params.get("beam_width") not in (None, 1):
            # Requests of a beam search cannot be planned, paused or retracted here.
            raise ValueError("beam search is not co-served: leave beam_width out, or use 1")
        patterns |= dict.fromkeys(_checked_stops(params, "stop_regex"))
        _checked_stops(params, "stop")
    check_stop_patterns(patterns)
    num_requests = num_choices * _num_prompts(request)
    if num_requests > _MOST_REQUESTS:
        raise ValueError(
            f"{num_requests} prompts and choices in one request: use at most {_MOST_REQUESTS}"
        )


def _check_files(name: str, value: object) -> None:
    """Check that media are files: SGLang sends tensors of any shape and key to the scheduler."""
    if isinstance(value, list):
        for one in value:
            _check_files(name, one)
    elif isinstance(value, Mapping) and "format" in value:
        raise RequestError(f"{name}: computed features are set by the server only: send the file")


def _set_fields(request: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields that have another value than null and their default."""
    for field in fields(request):
        value = getattr(request, field.name)
        is_default = field.default is not MISSING and type(value) is type(field.default)
        if value is not None and not (is_default and value == field.default):
            yield field.name, value


def _check_rule(name: str, rule: Bound | Rule | None, *, given_by_client: bool) -> None:
    if rule is None:
        raise RequestError(f"{excerpt(name)} is no field that co-serving knows: leave it out")
    if rule is Rule.REFUSED or (rule is Rule.SERVER and given_by_client):
        raise RequestError(f"{name} is {rule.value}: leave it out")


class ModelLimits(NamedTuple):
    """Sizes of the model."""

    vocab_size: int
    hidden_size: int
    context_tokens: int
    is_multimodal: bool = False


def check_values(request: Any, model: ModelLimits, given_ids: Sequence[int] | None) -> None:
    """Check a request that SGLang has tokenized. Its fields have the right types.

    ``given_ids`` are the token ids of the prompt if the client gave ids. The request's own ids may
    have placeholders of images and sounds by now, outside of the vocabulary on purpose.

    Stop tokens outside of the vocabulary are dropped, since they never match: another
    request's ``min_new_tokens`` would make the engine look them up. O(prompt tokens).

    Raises:
        ValueError: it has no token, token ids outside the vocabulary, values out of range, asks
            for too many log-probabilities, or cuts a session that may have media.
    """
    vocab_size = model.vocab_size
    if model.is_multimodal and getattr(getattr(request, "session_params", None), "offset", None):
        raise ValueError(
            "session_params: offset cuts the prompt, but not the media of the session, which a "
            "multimodal model then looks for in vain: send the prompt without a session"
        )
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
        ("token_ids_logprob", len(scored), MOST_LOGPROBS),
    ):
        if count > most:
            raise ValueError(f"{name} has {count} tokens: use at most {most}")
    for token, bias in biases.items():
        if not -_MOST_BIAS <= bias <= _MOST_BIAS:
            raise ValueError(f"the logit_bias of {token} is {bias!r}: use -100 to 100")
    if (asked := getattr(request, "top_logprobs_num", 0)) > vocab_size:
        raise ValueError(f"{asked} top logprobs: use 0 to {vocab_size}")
    add_logprobs(request, model.context_tokens)
    if (overrides := request.positional_embed_overrides) is not None:
        _check_vectors(overrides.embeds, model.hidden_size)


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
    for name in ("text", "input_ids"):
        prompts = getattr(request, name)
        if isinstance(prompts, list):
            # SGLang tells token ids of one prompt from several prompts by the first item.
            return 1 if prompts and isinstance(prompts[0], int) else len(prompts)
        if prompts is not None:
            return 1
    return 1


def _check_vectors(vectors: Any, hidden_size: int) -> None:
    """Check the rows of a tensor that take the place of tokens' embeddings."""
    if (width := vectors.shape[-1]) != hidden_size:
        raise ValueError(f"embed_overrides: a vector has {width} numbers: use {hidden_size}")
    if not vectors.isfinite().all():
        raise ValueError("embed_overrides: not all numbers are finite: send finite ones")


def _check_token_ids(name: str, token_ids: array[int], vocab_size: int) -> None:
    ids = numpy.frombuffer(token_ids, numpy.int64)  # 100,000 of them in 0.1 ms, without a copy.
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise ValueError(f"{name}: token ids of this model are 0 to {vocab_size - 1}")
