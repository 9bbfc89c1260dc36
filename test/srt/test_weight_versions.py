"""A change of weights is noted for requests in every place, on the real scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from srt import test_scheduler as scenarios
from srt.scripted_engine import EngineProcess, ScriptedEngine, Spec
from srt.test_planned_scheduler import LOOSE, TIGHT

pytest.importorskip("sglang.srt.utils.weight_versions")


def places_of(engine: ScriptedEngine) -> dict[str, set[str]]:
    """Which requests with tokens are in which place."""
    view, batch = engine.scheduler.parts.queues, engine.scheduler.running_batch
    suspended = view.suspended_batch
    places = {
        "running": batch.reqs,
        "paused": view.paused_requests.paused,
        "parked": view.paused_requests.parked,
        "suspended": suspended.reqs if suspended is not None else (),
    }
    found = {place: {r.rid for r in reqs if r.output_ids} for place, reqs in places.items()}
    begun = {rid for rid, req in engine.reqs.items() if req.output_ids and not req.finished()}
    found["elsewhere"] = begun - set().union(*found.values())
    return found


def run_with_changes(
    engine: ScriptedEngine, specs: list[Spec]
) -> tuple[dict[str, set[str]], dict[str, tuple[list[int], list[int]]]]:
    """Change the version in every tenth round; return the places that were seen, and for each
    request the tokens that it had at the changes, as it was seen and as it was noted."""
    from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

    seen: dict[str, list[int]] = {spec[0]: [] for spec in specs}
    places: dict[str, set[str]] = {}

    def script(iteration: int) -> Iterator[Any]:
        if iteration == 0:
            return iter([engine.request(*spec) for spec in specs if spec[3]])
        if iteration > 200:
            raise StopIteration
        online = [spec for spec in specs if not spec[3]]
        if iteration % 10 == 3 and iteration // 10 < len(online):
            return iter([engine.request(*online[iteration // 10])])
        if iteration % 10 != 6:
            return iter(())
        for place, rids in places_of(engine).items():
            places.setdefault(place, set()).update(rids)
        return iter([UpdateWeightVersionReqInput(new_version=f"v{iteration}")])

    record = engine.scheduler.record_weight_version_change

    def recording(new_version: str | None) -> None:
        # Under overlap scheduling a request may have ended since the script ran.
        before = {rid: len(req.output_ids) for rid, req in engine.reqs.items()}
        live = {entry.req.rid for entry in engine.scheduler.parts.requests}
        for rid in live:
            if before[rid]:
                seen[rid].append(before[rid])
        record(new_version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.scheduler, "record_weight_version_change", recording)
        engine.run(script)
    noted = {
        rid: [event.num_output_tokens for event in req.weight_version_events]
        for rid, req in engine.reqs.items()
    }
    engine.assert_nothing_leaked()
    return places, {rid: (counts, noted[rid]) for rid, counts in seen.items()}


@pytest.mark.parametrize("settings", [TIGHT, LOOSE], ids=["paused", "lanes"])
def test_every_live_request_notes_each_change_once(
    start_engine: Any, settings: dict[str, Any]
) -> None:
    engine: EngineProcess = start_engine(page_size=1, coserve=settings)
    specs: list[Spec] = [(f"off{i}", scenarios.prompt(i, 300), 60, True) for i in range(12)]
    specs += [(f"on{i}", scenarios.prompt(50 + i, 150), 12, False) for i in range(8)]
    places, counts = engine.call(run_with_changes, specs)
    if settings is TIGHT:
        assert places["paused"]
    assert places["paused"] | places["suspended"] | places["elsewhere"]
    assert any(events for _, events in counts.values())
    for rid, (seen, noted) in counts.items():
        assert noted == seen, rid
