"""Which versions of SGLang are refused, and how."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sglang_coserve.errors import UnsupportedError
from sglang_coserve.srt.compat import versions
from sglang_coserve.srt.compat.versions import (
    NEWEST,
    OVERRIDE_VARIABLE,
    SUPPORTED,
    check_version,
    start_up_line,
    supported_text,
    version_key,
)

ROOT = Path(__file__).parents[3]

_MAJOR, _MINOR, _PATCH = version_key(NEWEST)
NEXT = f"{_MAJOR}.{_MINOR}.{_PATCH + 1}"
"""A version that is not supported yet."""


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def found(_name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)


@pytest.mark.parametrize("version", [*SUPPORTED, f"{NEWEST}.post1"])
def test_every_supported_version_is_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, version)
    check_version({})
    assert start_up_line() == f"co-serving on SGLang {version} (supported: {supported_text()})"


@pytest.mark.parametrize(
    "version",
    [
        "0.5.16",
        "0.5.16.post2",
        "0.5.18",
        "0.5.22",
        f"{NEWEST}rc1",
        NEXT,
        f"{_MAJOR}.{_MINOR + 1}.0",
        "0.1.dev1+g0123456",
    ],
)
def test_another_version_is_refused_in_one_line(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, version)
    with pytest.raises(
        UnsupportedError, match=re.escape(f"{supported_text()}, found {version}:")
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
    assert f"SGLang 0.5.99 (supported: {supported_text()})" in start_up_line()


@pytest.mark.parametrize(
    ("supported", "text"),
    [
        (("0.5.23",), "0.5.23"),
        (("0.5.17", "0.5.23"), "0.5.17 and 0.5.23"),
        (("0.5.17", "0.5.23", "0.5.24"), "0.5.17, 0.5.23 and 0.5.24"),
    ],
)
def test_supported_versions_are_listed_in_words(
    supported: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "SUPPORTED", supported)
    monkeypatch.setattr(versions, "NEWEST", supported[-1])
    assert supported_text() == text


def test_what_is_no_version_is_said_to_be_none() -> None:
    assert [version_key(text) for text in ("0.5.21.post1", "0.1.dev1")] == [(0, 5, 21), (0, 1, 0)]
    with pytest.raises(ValueError, match="not a version of SGLang: 'main'"):
        version_key("main")


# --- Where versions are named ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("README.md", f"with SGLang {NEWEST}, for a GPU"),
        ("README.md", f"[SGLang {supported_text()}](docs/upgrading.md)"),
        ("docs/examples/Dockerfile", f"FROM lmsysorg/sglang:v{NEWEST} AS engine"),
        ("docs/upgrading.md", f"\n| {NEWEST} | "),
        (f"requirements/cpu-{NEWEST}.txt", f"\nsglang=={NEWEST}\n"),
    ],
)
def test_the_newest_version_is_named_in(place: str, line: str) -> None:
    assert line in (ROOT / place).read_text()


def test_the_extra_engine_takes_the_supported_versions_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = map(Requirement, project["optional-dependencies"]["engine"])
    taken = next(each.specifier for each in requirements if each.name == "sglang")
    numbers = range(version_key(SUPPORTED[0])[2] - 1, _PATCH + 2)
    versions = [f"{_MAJOR}.{_MINOR}.{patch}" for patch in numbers]
    assert [version for version in versions if version in taken] == list(SUPPORTED)


def test_the_newest_version_is_installed_by_default() -> None:
    lines = (ROOT / "scripts/setup").read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("versions="))
    script = "\n".join([*lines[begin : begin + 2], 'echo "$sglang"'])
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{NEWEST}\n"
