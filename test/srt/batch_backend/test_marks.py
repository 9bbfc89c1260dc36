"""What a line tells the scheduler, and what the scheduler makes of nonsense."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.srt.offline_marks import (
    deadline_of,
    offline_marks,
    restore_generated,
    user_of,
)


def request_with(custom_params: Any, **attributes: Any) -> Any:
    """As much of SGLang's ``Req`` as the marks are read from."""
    params = SimpleNamespace(custom_params=custom_params, max_new_tokens=100)
    fresh = {"output_ids": [], "grammar": None, "multimodal_inputs": None, "vocab_size": 50}
    return SimpleNamespace(
        rid="r", sampling_params=params, require_reasoning=False, **{**fresh, **attributes}
    )


def test_marks_are_read_as_they_were_made() -> None:
    req = request_with(offline_marks(due_in_s=-5.5, user="batch_1", generated=(1, 2)))
    assert deadline_of(req, arrival_s=20.0) == 14.5
    assert user_of(req) == "batch_1"
    restore_generated(req, None)
    restore_generated(req, None)
    assert req.output_ids == [1, 2]


@pytest.mark.parametrize("custom_params", [None, {}, {"thinking_budget": 5}])
def test_a_request_without_marks(custom_params: Any) -> None:
    req = request_with(custom_params)
    assert deadline_of(req, 20.0) is None
    assert user_of(req) is None
    restore_generated(req, None)
    assert req.output_ids == []


MALFORMED = st.one_of(
    st.none(), st.booleans(), st.floats(), st.text(), st.lists(st.one_of(st.text(), st.floats()))
)


@given(MALFORMED, MALFORMED, st.one_of(MALFORMED, st.lists(st.integers(), max_size=120)))
def test_malformed_marks_are_taken_for_absent(due: Any, user: Any, generated: Any) -> None:
    """They come in by the same field as a client's."""
    names = list(offline_marks(due_in_s=0, user="", generated=(1,)))[1:]
    req = request_with(dict(zip(names, (due, user, generated), strict=True)))
    deadline_s = deadline_of(req, 20.0)
    assert deadline_s is None or abs(deadline_s) < float("inf")
    assert user_of(req) == (user if isinstance(user, str) else None)
    restore_generated(req, None)
    assert len(req.output_ids) < 100
    assert all(isinstance(token, int) and 0 <= token < 50 for token in req.output_ids)


@pytest.mark.parametrize("state", [{"grammar": object()}, {"multimodal_inputs": object()}])
def test_state_beside_the_tokens_is_not_guessed(state: dict[str, Any]) -> None:
    marks = offline_marks(due_in_s=0, user="batch_1", generated=(1, 2))
    req = request_with(marks, **state)
    restore_generated(req, None)
    assert req.output_ids == []


def test_reasoning_tokens_of_before_are_counted() -> None:
    counted: list[Any] = []
    marks = offline_marks(due_in_s=0, user="batch_1", generated=(1, 2))
    req = request_with(marks, update_reasoning_tokens=lambda *args: counted.append(args))
    req.require_reasoning = True
    restore_generated(req, [9])
    assert counted == [([1, 2], [9])]
