"""Stop patterns take time linear in the text, and find what Python's would."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.guard.engine_limits import check_request
from sglang_coserve.guard.stop_patterns import check_stop_patterns
from srt.own_process import printed_by

pieces = st.sampled_from(
    ["a", "b", "[ab]", "a*", "b+", "(ab)?", "(a|b)", "a{2,3}", ".", r"\d", "^", "$"]
)
patterns = st.lists(pieces, min_size=1, max_size=5).map("".join)


@given(patterns, st.text("ab1\n", max_size=12))
def test_the_same_is_found_as_by_python(pattern: str, text: str) -> None:
    from sglang_coserve.guard.stop_patterns import LinearSearch

    check_stop_patterns([pattern])
    # Before a last line break, only Python's dollar matches.
    if "$" in pattern and text.endswith("\n"):
        return
    assert bool(LinearSearch().search(pattern, text)) == bool(re.search(pattern, text))


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("(a", "unterminated"),
        ("(?<=a)b", "look-around"),
        (r"(a)\1", "backreference"),
        ("(a{1000}){1000}", "1000010 positions"),
        ("a{491}", "501 positions"),
        (r"[\w-]{10}", "510 positions"),
        ("(" * 3000 + "a" + ")" * 3000, "nested"),
        ("*", "nothing to repeat"),
    ],
    ids=lambda value: value[:20],
)
def test_what_cannot_be_searched_for_is_refused(pattern: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"stop_regex.*{told}"):
        check_stop_patterns([pattern])


def test_all_patterns_of_a_request_count_together() -> None:
    """Each is searched for after every token."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    check_stop_patterns(f"a{{100}}{number}" for number in range(4))
    with pytest.raises(ValueError, match="all patterns together"):
        check_stop_patterns(f"a{{100}}{number}" for number in range(5))
    prompts = [{"stop_regex": f"a{{100}}{number}"} for number in range(5)]
    request = GenerateReqInput(text=["x"] * 5, sampling_params=prompts)
    with pytest.raises(ValueError, match="all patterns together"):
        check_request(request)
    request.sampling_params = prompts[:1] * 5
    check_request(request)


HOSTILE = r"""
from sglang_coserve.guard.stop_patterns import LinearSearch, check_stop_patterns
text = "the old mill by the river " * 600
for pattern in (r"(.*)*(.*)*(.*)*\x01", r"(\w+\s?)*\x01", r"(a|a|b|b|.|.)*\x01", "(a?){30}" * 16):
    check_stop_patterns([pattern])
    print(LinearSearch().search(pattern, text))
"""


def test_no_pattern_takes_forever() -> None:
    """Python's search would."""
    assert printed_by(HOSTILE) == ["None", "None", "None", "True"]
