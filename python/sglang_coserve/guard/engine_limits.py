"""Checks requests for values that SGLang accepts but that crash or stop its processes.

One such request could end the server for all users, and a line of a batch would do so again after
each restart, since batches are resumed. So every request to the scheduler is checked here,
whatever its entry point.

SGLang searches the output of a request for its ``stop_regex`` after every token, in the scheduler,
with Python's ``re``: nested repetitions can take exponential time. The regex engine behind
pydantic's string patterns searches in linear time; it supports neither look-around nor
back-references, which need backtracking.
"""

from __future__ import annotations

import re
import warnings
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Final

import numpy
from pydantic import StringConstraints, TypeAdapter, ValidationError

from sglang_coserve.guard.bounds import FIELD_BOUNDS, PARAM_BOUNDS, check_number, excerpt
from sglang_coserve.guard.replacements import replace

_MOST_STATES: Final = 2000
"""Largest number of states of a pattern with its repetitions expanded. At worst each is visited for
each character, which takes 10 ms for the 16,000 characters of a long output."""

# Additional copies that an unbounded repetition counts as: it loops in its own states.
_ENDLESS: Final = 1


def check_stop_pattern(pattern: str) -> None:
    """Check that ``pattern`` can be searched for in linear time. O(pattern).

    Raises:
        ValueError: it is malformed, too large, or needs backtracking.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            states = _num_states(re._parser.parse(pattern))  # type: ignore[attr-defined]
        if states > _MOST_STATES:
            raise ValueError(
                f"it has {states} positions with its repetitions written out: use at most "
                f"{_MOST_STATES}"
            )
        _searcher(pattern)
    except RecursionError:
        raise ValueError("stop_regex is nested too deeply") from None
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ValueError(f"stop_regex cannot be used: {lines[-1] if lines else error}") from None


def install_stop_patterns() -> None:
    """Make SGLang's scheduler in this process search for stop patterns in linear time."""
    replace("sglang.srt.managers.schedule_batch.re", LinearSearch())


class LinearSearch:
    """The part of the module ``re`` that SGLang's requests use."""

    error = re.error

    def search(self, pattern: str, text: str) -> bool | None:
        """Return True if ``text`` contains ``pattern``, else None. O(text).

        Raises:
            re.error: the pattern is not supported; ``check_stop_pattern`` would refuse it.
        """
        try:
            _searcher(pattern).validate_python(text)
        except ValidationError:
            return None
        except Exception as error:
            raise re.error(str(error)) from None
        return True


@lru_cache(maxsize=256)
def _searcher(pattern: str) -> TypeAdapter[str]:
    return TypeAdapter(Annotated[str, StringConstraints(pattern=pattern)])


def _num_states(parsed: Any) -> int:
    """Return the number of character positions of a parsed pattern, repetitions expanded."""
    total = 0
    for operation, value in parsed:
        name = str(operation)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, most, inner = value
            is_endless = most == re._parser.MAXREPEAT  # type: ignore[attr-defined]
            times = least + _ENDLESS if is_endless else most
            total += times * _num_states(inner)
        elif name == "SUBPATTERN":
            total += _num_states(value[-1])
        elif name == "BRANCH":
            total += sum(_num_states(branch) for branch in value[1])
        else:
            total += 1
    return total


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

_MOST_LOGPROBS: Final = 1024
"""Log-probabilities of one position: each becomes a Python object in three processes, while other
requests wait."""

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
        _check_stops(params)
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
    most = min(_MOST_LOGPROBS, vocab_size)
    if not 0 <= (asked := getattr(request, "top_logprobs_num", 0)) <= most:
        raise ValueError(f"{excerpt(asked)} top logprobs: use 0 to {most}")


def _check_ids(rid: Any) -> None:
    for one in rid if isinstance(rid, list) else [rid]:
        if one is None:
            continue
        if not isinstance(one, str) or not 1 <= len(one) <= _MOST_ID_CHARS:
            raise ValueError(f"rid is {excerpt(one)}: use 1 to {_MOST_ID_CHARS} characters")
        if one.startswith(_HEALTH_CHECK_ID):
            raise ValueError(f"rid is {excerpt(one)}: use one that is not for health checks")


def _check_stops(params: Mapping[str, Any]) -> None:
    for name in ("stop", "stop_regex"):
        given = params.get(name)
        if given is None:
            continue
        stops = given if isinstance(given, list) else [given]
        if len(stops) > _MOST_STOPS:
            raise ValueError(f"{name} has {len(stops)} entries: use at most {_MOST_STOPS}")
        for stop in stops:
            if not isinstance(stop, str):
                raise ValueError(f"{name} is {excerpt(stop)}: use text, or a list of texts")
            if len(stop) > _MOST_STOP_CHARS:
                raise ValueError(
                    f"{name} has {len(stop)} characters: use at most {_MOST_STOP_CHARS}"
                )
            if name == "stop_regex":
                check_stop_pattern(stop)


def _num_prompts(request: Any) -> int:
    for prompts in (request.text, request.input_ids, getattr(request, "input_embeds", None)):
        if isinstance(prompts, list):
            is_single = bool(prompts) and isinstance(prompts[0], int)
            return 1 if is_single else len(prompts)
        if prompts is not None:
            return 1
    return 1


def _check_token_ids(name: str, token_ids: array[int], vocab_size: int) -> None:
    ids = numpy.frombuffer(token_ids, numpy.int64)  # 100,000 of them in 0.1 ms, without a copy.
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise ValueError(f"{name}: token ids of this model are 0 to {vocab_size - 1}")
