"""One server under load for the tests of the package."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_coserve.small_model import SmallModelSpec, make_small_model
from srt.monitoring.watched import Watched, served


@pytest.fixture(scope="package")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    directory = tmp_path_factory.mktemp("watched")
    # Layers enough for safepoints between them.
    model = make_small_model(directory / "model", SmallModelSpec(hidden=64, layers=8, context=1024))
    with served(model, directory) as running:
        yield running
