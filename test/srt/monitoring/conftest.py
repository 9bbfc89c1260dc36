"""One server under load for the tests of the package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from srt.monitoring.watched import Watched, served


@pytest.fixture(scope="package")
def watched(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with served(small_model, tmp_path_factory.mktemp("watched")) as running:
        yield running
