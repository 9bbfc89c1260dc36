"""The command line of the safepoint benchmark."""

from __future__ import annotations

import pytest

from bench_safepoint import parse_options


def test_a_context_too_short_for_its_prompts_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        parse_options(["--context", "1024"])
    assert end.value.code == 2
    assert "--context 1024: use 1088 or more" in capsys.readouterr().err
    assert parse_options(["--context", "1088"]).context == 1088
