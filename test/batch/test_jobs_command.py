"""``coserve jobs``: what can be done about batches while no server runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from batch.scenarios import OWNER, lines, opened
from batch.scripted_backend import ScriptedBackend
from sglang_coserve.batch.errors import BatchRequestError
from sglang_coserve.batch.owners import owner_of
from sglang_coserve.cli import app
from sglang_coserve.errors import CoserveError, StartupError

KEY_OWNER = owner_of("a key")


def jobs(directory: Path, *arguments: str) -> str:
    """What the command prints; it raises what ``main`` would tell."""
    result = CliRunner().invoke(app, ["jobs", "--data-dir", str(directory), *arguments])
    if isinstance(result.exception, CoserveError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def stopped(tmp_path: Path) -> tuple[Path, list[str]]:
    """A directory that a server has left, with three batches that are under way."""

    async def scenario() -> list[str]:
        scene = await opened(tmp_path, ScriptedBackend(holds=True), max_in_flight=3)
        async with scene.service:
            batches = [await scene.create(lines(2)) for _ in range(3)]
            for batch in batches:
                await scene.reaches(batch.id, "in_progress")
            await scene.in_flight(3)
            await scene.service._context.store.run(
                lambda db: db.execute(
                    "UPDATE batches SET owner = ? WHERE id = ?", (KEY_OWNER, batches[2].id)
                )
            )
        return [batch.id for batch in batches]

    return tmp_path, asyncio.run(scenario())


async def test_batches_of_everybody_are_listed_and_changed(stopped: tuple[Path, list[str]]) -> None:
    directory, ids = stopped
    rows = jobs(directory, "list").splitlines()
    assert [row.split()[0] for row in rows] == ids[::-1]
    assert "in_progress  0 ok, 0 failed of 2" in rows[0]
    assert rows[0].endswith(f"owner {KEY_OWNER[:8]}")
    assert KEY_OWNER not in rows[0]
    assert rows[1].endswith(f"owner {OWNER}")
    (newest,) = jobs(directory, "list", "--limit", "1", "--json").splitlines()
    assert json.loads(newest)["id"] == ids[2]
    assert json.loads(newest)["owner"] == KEY_OWNER[:8]

    assert "cancelling" in jobs(directory, "cancel", ids[0])
    assert "(paused)" in jobs(directory, "pause", ids[1])
    assert json.loads(jobs(directory, "pause", ids[2], "--json"))["coserve"]["paused"]
    assert "(paused)" not in jobs(directory, "resume", ids[2])
    scene = await opened(directory)
    async with scene.service as service:
        assert (await scene.ends(ids[0])).status == "cancelled"
        await scene.eventually(
            lambda: _is_done(service._context.store, ids[2]),
        )
        waiting = await service.retrieve_batch(OWNER, ids[1])
        assert (waiting.status, waiting.coserve.paused) == ("in_progress", True)
        assert {request.batch_id for request in scene.backend.started} == {ids[2]}
    assert "completed  2 ok" in jobs(directory, "list", "--limit", "1")
    with pytest.raises(BatchRequestError, match="cannot cancel"):
        jobs(directory, "cancel", ids[2])


async def _is_done(store: object, batch_id: str) -> bool | None:
    row = await store.run(  # type: ignore[attr-defined]
        lambda db: db.execute("SELECT status FROM batches WHERE id = ?", (batch_id,)).fetchone()
    )
    return row[0] == "completed" or None


async def test_a_directory_that_a_server_has_is_left_to_it(tmp_path: Path) -> None:
    async with (await opened(tmp_path)).service:
        with pytest.raises(StartupError, match="'coserve list' or 'coserve cancel BATCH'"):
            jobs(tmp_path, "list")
    assert jobs(tmp_path, "list") == ""


def test_what_is_no_data_directory_is_not_made_one(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(StartupError, match="holds no batches"):
            jobs(directory, "list")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_batch_is_named(stopped: tuple[Path, list[str]]) -> None:
    with pytest.raises(BatchRequestError, match="no such batch: 'batch_x"):
        jobs(stopped[0], "cancel", "batch_x\x1b[2J")
