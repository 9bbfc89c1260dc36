"""Engines shared by the tests of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from srt.batch_backend.served import Served
from srt.own_engine import own_engine


@pytest.fixture(scope="package")
def start(small_model: Path) -> Iterator[Callable[..., Served]]:
    """Starts engines, one at a time: SGLang ends all children of a process with any of them."""
    running: dict[bool, Served] = {}

    def start(*, is_embedding: bool = False) -> Served:
        if is_embedding not in running:
            running.clear()
            engines.close()
            engine = engines.enter_context(
                own_engine(
                    small_model,
                    {
                        "offline_max_running": 4,
                        "startup_profile_seconds": 0,
                        # Offline requests go on beside online ones.
                        "slo_ttft_ms": 60_000.0,
                        "slo_tpot_ms": 60_000.0,
                    },
                    # Since 0.5.22 /v1/responses answers for no other name.
                    served_model_name="small",
                    max_total_tokens=4096,
                    chunked_prefill_size=64,
                    is_embedding=is_embedding,
                    enable_custom_logit_processor=True,
                )
            )
            running[is_embedding] = Served(engine)
        return running[is_embedding]

    with ExitStack() as engines:
        yield start


@pytest.fixture
def served(start: Callable[..., Served]) -> Served:
    return start()
