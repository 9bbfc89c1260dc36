"""Engines shared by the tests of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from srt.batch_backend.served import Served


@pytest.fixture(scope="package")
def start(small_model: Path) -> Iterator[Callable[..., Served]]:
    """Starts engines, one at a time: SGLang ends all children of a process with any of them."""
    from sglang_coserve.config import CoserveConfig
    from sglang_coserve.srt.engine import CoserveEngine

    running: dict[tuple[str, bool], Served] = {}

    def start(policy: str = "fifo", *, is_embedding: bool = False) -> Served:
        if (policy, is_embedding) not in running:
            stop()
            engine = CoserveEngine(
                model_path=str(small_model),
                # Since 0.5.22 /v1/responses answers for no other name.
                served_model_name="small",
                dtype="float32",
                max_total_tokens=4096,
                chunked_prefill_size=64,
                is_embedding=is_embedding,
                enable_custom_logit_processor=True,
                coserve_config=CoserveConfig(
                    offline_policy=policy,
                    offline_max_running=4,
                    startup_profile_seconds=0 if policy == "fifo" else 1,
                ),
            )
            running[policy, is_embedding] = Served(engine)
        return running[policy, is_embedding]

    def stop() -> None:
        for served in running.values():
            served.engine.shutdown()
        running.clear()

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
        yield start
    stop()


@pytest.fixture
def served(start: Callable[..., Served]) -> Served:
    return start()
