"""What the backend says of its model and its load."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_coserve.lines.backend import BackendLoad
from srt.batch_backend.served import COMPLETION, COMPLETIONS, PROMPT, Served
from waiting import until


@pytest.fixture
def weight_version(served: Served) -> Iterator[str]:
    """That of the start; it and the model's name, which SGLang loses, count again afterwards."""
    manager = served.manager
    version, name = manager.config_value("weight_version"), manager.served_model_name
    yield version
    manager._update_weight_version_if_provided(version)
    manager.served_model_name = name


def test_the_model_is_told_apart_by_its_weights(served: Served, weight_version: str) -> None:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    names = [served.backend.model]
    assert names == [served.backend.model]
    served.manager._update_weight_version_if_provided(f"{weight_version} or later")
    names.append(served.backend.model)
    for path, is_loaded in ((served.manager.model_path, True), ("/nowhere", False)):
        # From the same path too, and also when it fails: part may have been exchanged.
        update = UpdateWeightFromDiskReqInput(model_path=path)
        assert served.do(served.manager.update_weights_from_disk(update))[0] is is_loaded
        names.append(served.backend.model)
    assert len(set(names)) == 4
    served.do(served.backend.settled())


def test_lines_leave_cached_kv_alone_until_an_update_has_emptied_the_cache(
    served: Served,
    weight_version: str,
) -> None:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    manager, weights = served.manager, served.manager.coserve_weights
    for path, flushes in ((manager.model_path, False), ("/nowhere", True)):
        update = UpdateWeightFromDiskReqInput(model_path=path, flush_cache=flushes)
        is_updated = path != "/nowhere"
        assert served.do(manager.update_weights_from_disk(update))[0] is is_updated
        assert weights.cache_key == weights.name != ""
    update = UpdateWeightFromDiskReqInput(model_path=manager.model_path, flush_cache=True)
    assert served.do(manager.update_weights_from_disk(update))[0]
    assert weights.cache_key == ""


def test_the_engine_says_what_to_expect_and_who_else_is_served(served: Served) -> None:
    from sglang_coserve.srt.batch_backend import BatchBackend
    from sglang_coserve.srt.monitoring.scheduler_query import EXPECTED_RATE_KEY, STATE_KEY

    (info,) = served.engine._scheduler_init_result.scheduler_infos
    expected = info[STATE_KEY][EXPECTED_RATE_KEY]
    assert expected > 0
    backend = BatchBackend(
        served.manager,
        served.engine.template_manager,
        fingerprint="small",
        expected_tokens_per_s=expected,
    )
    assert backend.load() == BackendLoad(expected)

    async def beside(others: Any) -> list[bool]:
        tasks = [asyncio.create_task(other) for other in others]
        await until(lambda: len(served.manager.rid_to_state) >= len(tasks))
        is_busy = served.backend.load().is_online_busy
        await asyncio.gather(*tasks)
        return [is_busy, served.backend.load().is_online_busy]

    params = {"max_new_tokens": 200, "ignore_eos": True}
    line = served.run(COMPLETIONS, COMPLETION)
    online = served.engine.async_generate(PROMPT, params)
    assert served.do(beside([line])) == [False, False]
    assert served.do(beside([served.run(COMPLETIONS, COMPLETION), online])) == [True, False]
