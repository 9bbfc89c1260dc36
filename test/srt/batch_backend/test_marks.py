"""What a line tells the scheduler, and when that is put into its request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_coserve.srt.marks.offline_marks import (
    attach_marks,
    deadline_of,
    expected_tokens_of,
    offline_marks,
    restore_generated,
    sent_with,
)


def request_with(custom_params: Any, **attributes: Any) -> Any:
    """As much of SGLang's ``Req`` as the marks are read from."""
    params = SimpleNamespace(custom_params=custom_params, max_new_tokens=100)
    fresh = {"output_ids": [], "grammar": None, "multimodal_inputs": None, "vocab_size": 50}
    fresh["return_logprob"] = False
    return SimpleNamespace(
        rid="r", sampling_params=params, require_reasoning=False, **{**fresh, **attributes}
    )


def test_marks_are_read_as_they_were_made() -> None:
    line = offline_marks(due_in_s=-5.5, job="batch_1", generated=(1, 2), expected_output_tokens=7)
    bare = offline_marks(due_in_s=None, job="batch_1")
    of_a_client = {"coserve_class": "offline", "coserve_deadline_s": 2.5}
    for marks, due_s, expected in ((line, 14.5, 7), (bare, None, None), (of_a_client, 22.5, None)):
        req = request_with(marks)
        assert deadline_of(req, arrival_s=20.0) == due_s
        assert expected_tokens_of(req) == expected
    req = request_with(line)
    restore_generated(req, None)
    restore_generated(req, None)
    assert req.output_ids == [1, 2]


def test_marks_are_attached_only_where_they_were_set() -> None:
    params = SimpleNamespace(custom_params={"a": 1})
    attach_marks(params)
    assert params.custom_params == {"a": 1}
    with sent_with(offline_marks(due_in_s=3, job="batch_1")):
        attach_marks(params)
    assert params.custom_params["a"] == 1
    assert deadline_of(SimpleNamespace(sampling_params=params), 20.0) == 23.0
    other = SimpleNamespace(custom_params=None)
    attach_marks(other)
    assert other.custom_params is None


@pytest.mark.parametrize(
    "state",
    [{"grammar": object()}, {"multimodal_inputs": object()}, {"return_logprob": True}],
    ids=" ".join,
)
def test_state_beside_the_tokens_is_not_guessed(state: dict[str, Any]) -> None:
    marks = offline_marks(due_in_s=0, job="batch_1", generated=(1, 2))
    req = request_with(marks, **state)
    restore_generated(req, None)
    assert req.output_ids == []


def test_reasoning_tokens_of_before_are_counted() -> None:
    counted: list[Any] = []
    marks = offline_marks(due_in_s=0, job="batch_1", generated=(1, 2))
    req = request_with(marks, update_reasoning_tokens=lambda *args: counted.append(args))
    req.require_reasoning = True
    restore_generated(req, [9])
    assert counted == [([1, 2], [9])]
