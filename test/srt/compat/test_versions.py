"""Which versions of SGLang are refused, and how."""

from __future__ import annotations

import importlib.metadata
import re

import pytest

from sglang_coserve.errors import UnsupportedError
from sglang_coserve.srt.compat.versions import (
    OVERRIDE_VARIABLE,
    SUPPORTED,
    check_version,
    start_up_line,
    version_key,
)


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def found(_name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)


@pytest.mark.parametrize("version", [*SUPPORTED, "0.5.23.post1"])
def test_every_supported_version_is_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, version)
    check_version({})
    assert start_up_line() == f"co-serving on SGLang {version} (supported: 0.5.17 and 0.5.23)"


@pytest.mark.parametrize(
    "version",
    [
        "0.5.16",
        "0.5.16.post2",
        "0.5.18",
        "0.5.22",
        "0.5.23rc1",
        "0.5.24",
        "0.6.0",
        "0.1.dev1+g0123456",
    ],
)
def test_another_version_is_refused_in_one_line(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, version)
    with pytest.raises(
        UnsupportedError, match=f"0.5.17 and 0.5.23, found {re.escape(version)}:"
    ) as refused:
        check_version({})
    assert OVERRIDE_VARIABLE in str(refused.value)
    assert "\n" not in str(refused.value)


def test_no_sglang_is_told_from_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    with pytest.raises(UnsupportedError, match="none is installed"):
        check_version({OVERRIDE_VARIABLE: "1"})


def test_an_untested_version_can_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.5.99")
    check_version({OVERRIDE_VARIABLE: "1"})
    assert "SGLang 0.5.99 (supported: 0.5.17 and" in start_up_line()


def test_what_is_no_version_is_said_to_be_none() -> None:
    assert [version_key(text) for text in ("0.5.21.post1", "0.1.dev1")] == [(0, 5, 21), (0, 1, 0)]
    with pytest.raises(ValueError, match="not a version of SGLang: 'main'"):
        version_key("main")
