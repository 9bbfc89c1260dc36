"""Fixtures of the client's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from client.fault_server import FaultServer


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with FaultServer() as fault_server:
        yield fault_server


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Where an input goes."""
    return tmp_path / "in.jsonl"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"
