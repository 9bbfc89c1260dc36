"""What others wrote reaches a terminal as text and nothing else."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.terminal import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a plain line\n\tand another", "a plain line\n\tand another"),
        ("Grüße, 世界 🙂", "Grüße, 世界 🙂"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x1b[2J\x1b[31mred", r"\x1b[2J\x1b[31mred"),
        ("50%\rdone", r"50%\x0ddone"),
        ("\x9b31m\x7f\x00", r"\x9b31m\x7f\x00"),
        ("gnp.\u202eexe", r"gnp.\u202eexe"),
        ("a\u200bb\u2066c\ufeff", r"a\u200bb\u2066c\ufeff"),
        ("\ud800\U000e0041", r"\ud800\U000e0041"),
        ("[red]no markup[/red]", "[red]no markup[/red]"),
    ],
)
def test_what_is_shown(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters()))
def test_no_control_is_left_and_twice_is_once(text: str) -> None:
    shown = printable(text)
    assert not any(
        unicodedata.category(char) in ("Cc", "Cf", "Cs") and char not in "\n\t" for char in shown
    )
    assert printable(shown) == shown
    shown.encode()
