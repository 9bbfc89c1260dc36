"""How many requests one body may become."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_coserve.srt.safeguards.engine_limits import check_request


def request(text: Any = None, input_ids: Any = None, n: int = 1) -> Any:
    return SimpleNamespace(
        text=text, input_ids=input_ids, input_embeds=None, rid=None, sampling_params={"n": n}
    )


@pytest.mark.parametrize(
    ("text", "input_ids", "n"),
    [(["a"] * 3000, None, 1), (None, [[1]] * 3000, 1), (["a"] * 30, None, 100)],
)
def test_a_body_with_too_many_prompts_is_refused(text: Any, input_ids: Any, n: int) -> None:
    with pytest.raises(ValueError, match="3000 prompts and choices"):
        check_request(request(text, input_ids, n))


def test_token_ids_are_one_prompt() -> None:
    check_request(request(input_ids=[1] * 5000))


def test_beam_search_is_refused() -> None:
    beams = request("a")
    beams.sampling_params["beam_width"] = 1
    check_request(beams)
    beams.sampling_params["beam_width"] = 4
    with pytest.raises(ValueError, match="leave beam_width out"):
        check_request(beams)
