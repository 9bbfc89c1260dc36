"""How many requests one body may become, and what its numbers may be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_coserve.errors import RequestError
from sglang_coserve.guard.engine_limits import FIELD_BOUNDS, PARAM_BOUNDS, check_request


def request(text: Any = None, input_ids: Any = None, **params: Any) -> Any:
    return SimpleNamespace(
        text=text, input_ids=input_ids, input_embeds=None, rid=None, sampling_params=params
    )


@pytest.mark.parametrize(
    ("text", "input_ids", "n"),
    [(["a"] * 3000, None, 1), (None, [[1]] * 3000, 1), (["a"] * 30, None, 100)],
)
def test_a_body_with_too_many_prompts_is_refused(text: Any, input_ids: Any, n: int) -> None:
    with pytest.raises(ValueError, match="3000 prompts and choices"):
        check_request(request(text, input_ids, n=n))


def test_token_ids_and_vectors_in_place_of_them_are_one_prompt() -> None:
    check_request(request(input_ids=[1] * 5000))
    body = request(n=8)
    body.input_embeds = [[0.5, 1.0]] * 260
    check_request(body)
    body.input_embeds = [[[0.5, 1.0]]] * 260
    with pytest.raises(ValueError, match="2080 prompts and choices"):
        check_request(body)


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
    bound, body = {**PARAM_BOUNDS, **FIELD_BOUNDS}[name], request("a")
    fields = body.sampling_params if name in PARAM_BOUNDS else vars(body)
    for value in (bound.least, bound.most, *([[bound.least]] if name in FIELD_BOUNDS else [])):
        fields[name] = value
        check_request(body)
    for wrong in (*NO_NUMBERS, bound.least - 1, bound.most * 2):
        fields[name] = wrong
        with pytest.raises(RequestError, match=f"{name} is .*: use a"):
            check_request(body)
