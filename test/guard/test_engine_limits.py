"""How many requests one body may become, and what its numbers may be."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput, SessionParams

from sglang_coserve.errors import RequestError
from sglang_coserve.guard.engine_limits import ModelLimits, check_request, check_values
from sglang_coserve.guard.request_fields import FIELDS, PARAMS
from sglang_coserve.number_bounds import Bound

OF_GENERATION, OF_EMBEDDINGS = (
    {field.name for field in dataclasses.fields(kind)}
    for kind in (GenerateReqInput, EmbeddingReqInput)
)
PARAM_BOUNDS = {name: rule for name, rule in PARAMS.items() if isinstance(rule, Bound)}
FIELD_BOUNDS = {
    name: rule
    for name, rule in FIELDS.items()
    # Other versions of SGLang have other fields.
    if isinstance(rule, Bound) and name in OF_GENERATION | OF_EMBEDDINGS
}


def request(text: Any = None, input_ids: Any = None, **params: Any) -> Any:
    return GenerateReqInput(text=text, input_ids=input_ids, sampling_params=params)


@pytest.mark.parametrize(
    ("text", "input_ids", "n"),
    [(["a"] * 3000, None, 1), (None, [[1]] * 3000, 1), (["a"] * 30, None, 100)],
)
def test_a_body_with_too_many_prompts_is_refused(text: Any, input_ids: Any, n: int) -> None:
    with pytest.raises(ValueError, match="3000 prompts and choices"):
        check_request(request(text, input_ids, n=n))


def test_token_ids_are_one_prompt() -> None:
    check_request(request(input_ids=[1] * 5000))


def test_beam_search_is_refused() -> None:
    beams = request("a")
    beams.sampling_params["beam_width"] = 1
    check_request(beams)
    beams.sampling_params["beam_width"] = 4
    with pytest.raises(ValueError, match="leave beam_width out"):
        check_request(beams)


INF = float("inf")
NO_NUMBERS: tuple[Any, ...] = ("1", True, [[]], {}, float("nan"), INF, -INF, 10**400, -(10**400))


@pytest.mark.parametrize("name", [*PARAM_BOUNDS, *FIELD_BOUNDS])
def test_a_number_is_within_both_of_its_bounds(name: str) -> None:
    bound = {**PARAM_BOUNDS, **FIELD_BOUNDS}[name]
    generates = name in OF_GENERATION or name in PARAM_BOUNDS
    body = request("a") if generates else EmbeddingReqInput(text="a")
    fields = body.sampling_params if name in PARAM_BOUNDS else vars(body)
    for value in (bound.least, bound.most, *([[bound.least]] if name in FIELD_BOUNDS else [])):
        fields[name] = value
        check_request(body)
    for wrong in (*NO_NUMBERS, bound.least - 1, bound.most * 2):
        fields[name] = wrong
        with pytest.raises(RequestError, match=f"{name} is .*: use a"):
            check_request(body)


def in_session(offset: int | None) -> Any:
    params = SimpleNamespace(stop_token_ids=None, logit_bias=None)
    session = SessionParams(id="a", rid="b", offset=offset)
    return SimpleNamespace(
        input_ids=[1, 2],
        mm_inputs=None,
        sampling_params=params,
        session_params=session,
        positional_embed_overrides=None,
        return_logprob=False,
    )


@pytest.mark.parametrize("offset", [1, -3, 10**6])
def test_a_session_that_may_have_media_is_not_cut(offset: int) -> None:
    """SGLang keeps the media of a prompt whose placeholders an offset has cut off."""
    with pytest.raises(ValueError, match="offset"):
        check_values(in_session(offset), ModelLimits(100, 8, 100, is_multimodal=True), None)


@pytest.mark.parametrize(("offset", "is_multimodal"), [(None, True), (0, True), (7, False)])
def test_other_sessions_go_on(offset: int | None, is_multimodal: bool) -> None:
    check_values(in_session(offset), ModelLimits(100, 8, 100, is_multimodal), None)
