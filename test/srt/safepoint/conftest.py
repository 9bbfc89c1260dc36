"""A model with enough layers for an abort to have a choice of them."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers instead of two, for all engines of these tests."""
    from sglang_coserve.small_model import SmallModelSpec, make_small_model

    directory = tmp_path_factory.mktemp("deep_model")
    return make_small_model(directory, SmallModelSpec(hidden=64, layers=6, context=1024))
