"""The data directory: one server at a time, and no names but ids."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from batch.scenarios import OWNER, lines, opened
from batch.scripted_backend import ScriptedBackend, failure
from sglang_coserve.batch.data_directory import DataDirectory
from sglang_coserve.disk_room import DiskRoom
from sglang_coserve.errors import StartupError, StorageError

BATCH = "batch_" + "0" * 24


async def opened_and_closed(root: Path) -> None:
    async with (await opened(root)).service:
        pass


def modes_in(root: Path) -> set[tuple[str, str]]:
    """The name and mode of the directory and all that is in it."""
    paths = [root, *root.rglob("*")]
    return {(path.name, stat.filemode(path.stat().st_mode)) for path in paths}


async def refused_and_mended(root: Path, name: str, mode: int) -> None:
    """What is as wide as ``mode`` stops the start, until the command that it names was run."""
    await opened_and_closed(root)
    (root / name).chmod(mode)
    with pytest.raises(StartupError, match="others than its owner may read") as caught:
        await opened(root)
    command = str(caught.value).rpartition(": ")[2]
    subprocess.run(["sh", "-c", command], check=True, timeout=60)
    await opened_and_closed(root)


class TestDirectory:
    async def test_two_servers_do_not_share_it(self, tmp_path: Path) -> None:
        async with (await opened(tmp_path)).service:
            with pytest.raises(StartupError, match="in use by another server"):
                await opened(tmp_path)
        async with (await opened(tmp_path)).service:
            pass

    async def test_it_must_be_writable(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        for bad in (tmp_path / "file", Path("/proc/coserve")):
            with pytest.raises(StartupError, match="name another --coserve-data-dir"):
                await opened(bad)

    async def test_a_damaged_database_unlocks_it_again(self, tmp_path: Path) -> None:
        database = tmp_path / "coserve.sqlite"
        database.touch(mode=0o600)
        database.write_bytes(b"nonsense" * 1000)
        for _ in range(2):
            with pytest.raises(StartupError, match="cannot use the batch database"):
                await opened(tmp_path)

    @pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
    async def test_all_that_is_made_is_its_owners_alone(self, tmp_path: Path, umask: int) -> None:
        root = tmp_path / "data"
        before = os.umask(umask)
        try:
            backend = ScriptedBackend(holds=True)
            scene = await opened(root, backend, max_attempts=1, journal_interval_s=0.01)
            async with scene.service:
                batch = await scene.create(lines(3))
                await scene.in_flight(3)
                backend.held("id-1").generate(4)
                backend.held("id-2").finish()
                backend.held("id-3").finish(failure(400))
                waits = lambda: len(list((root / "journal").iterdir())) == 1  # noqa: E731
                await scene.clock.until(waits)
                await scene.once(batch.id, lambda now: now.output_file_id and now.error_file_id)
                modes = modes_in(root)
        finally:
            os.umask(before)
        assert {mode for _, mode in modes} == {"drwx------", "-rw-------"}
        names = {name for name, _ in modes}
        assert {"coserve.sqlite", "coserve.sqlite-wal", "coserve.sqlite-shm", "lock"} <= names
        assert sum(name.startswith("file-") for name in names) == 3

    @pytest.mark.parametrize("mode", [0o750, 0o701, 0o705, 0o777, 0o1777, 0o2770])
    @pytest.mark.parametrize("name", ["", "files", "journal", "in_doubt"])
    async def test_a_directory_that_others_can_enter_is_refused(
        self, tmp_path: Path, name: str, mode: int
    ) -> None:
        await refused_and_mended(tmp_path / "a data", name, mode)

    @pytest.mark.parametrize("mode", [0o644, 0o660, 0o602])
    async def test_a_database_that_others_can_read_is_refused(
        self, tmp_path: Path, mode: int
    ) -> None:
        await refused_and_mended(tmp_path / "a data", "coserve.sqlite", mode)

    async def test_a_link_is_as_private_as_what_it_leads_to(self, tmp_path: Path) -> None:
        root, target = tmp_path / "data", tmp_path / "elsewhere"
        target.mkdir(mode=0o755)
        root.symlink_to(target)
        with pytest.raises(StartupError, match="chmod -R go="):
            await opened(root)
        target.chmod(0o700)
        await opened_and_closed(root)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
    async def test_somebody_elses_directory_is_refused(self, tmp_path: Path) -> None:
        root = tmp_path / "data"
        await opened_and_closed(root)
        for path in (root / "coserve.sqlite", root / "files", root):
            os.chown(path, 1234, -1)
            with pytest.raises(StartupError, match="belongs to the user with the number 1234"):
                await opened(root)
            os.chown(path, 0, -1)
        await opened_and_closed(root)

    def test_ids_are_the_only_names(self, tmp_path: Path) -> None:
        directory = DataDirectory(tmp_path)
        for name in ("../x", "", "file-", "file-" + "g" * 24, "file-" + "0" * 25, "/etc/passwd"):
            with pytest.raises(AssertionError):
                directory.file(name)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Says how many bytes of every disk are free; files that are there are not counted."""
    found = shutil.disk_usage("/")

    def is_free(size_bytes: int) -> None:
        usage = found._replace(free=size_bytes)
        monkeypatch.setattr("sglang_coserve.disk_room.shutil.disk_usage", lambda _: usage)

    return is_free


class TestFullDisk:
    async def test_a_start_makes_room_for_itself(
        self, tmp_path: Path, free: Callable[[int], None]
    ) -> None:
        await opened_and_closed(tmp_path)
        assert (tmp_path / "spare").stat().st_size == 1 << 20
        for folder in ("journal", "order"):
            (tmp_path / folder / BATCH).write_bytes(b"x")
        free(0)
        async with (await opened(tmp_path)).service as service:
            left = {path.name for path in tmp_path.rglob("*")}
            assert left.isdisjoint({"spare", BATCH})
            assert (await service.list_files(OWNER)).data == []
        free(1 << 40)
        await opened_and_closed(tmp_path)
        assert (tmp_path / "spare").stat().st_size == 1 << 20

    @pytest.mark.parametrize("may_displace", [True, False])
    def test_journals_give_way_to_all_but_journals(
        self, tmp_path: Path, free: Callable[[int], None], may_displace: bool
    ) -> None:
        directory = DataDirectory(tmp_path)
        directory.open()
        try:
            journal = directory.journal(BATCH)
            journal.write_bytes(b"x")
            free(99)
            with (
                pytest.raises(OSError, match="No space left"),
                directory.room.take(10, 90, may_displace=may_displace),
            ):
                pass
            assert journal.exists() is not may_displace
        finally:
            directory.close()

    def test_what_is_promised_to_one_is_not_to_another(
        self, tmp_path: Path, free: Callable[[int], None]
    ) -> None:
        free(100)
        room = DiskRoom(tmp_path, lambda: None)
        with room.take(60, 20):
            assert room.free_bytes() == 40
            with pytest.raises(OSError, match="No space left"), room.take(30, 20):
                pass
        with room.take(80, 20):
            pass

    async def test_uploads_displace_journals_and_are_refused_after_that(
        self, tmp_path: Path, free: Callable[[int], None]
    ) -> None:
        backend = ScriptedBackend(holds=True)
        scene = await opened(tmp_path, backend, journal_interval_s=0.01)
        async with scene.service:
            batch = await scene.create(lines(1))
            await scene.in_flight(1)
            backend.held("id-1").generate(2)
            journal = tmp_path / "journal" / batch.id
            await scene.clock.until(journal.exists)
            free(0)
            with pytest.raises(StorageError, match="disk is full"):
                await scene.upload(lines(1))
            assert not journal.exists()
            backend.held("id-1").generate(2)
            backend.finish_all()
            # Before, the batch waits because its key has more than fits.
            await scene.once(batch.id, lambda one: "No space left" in (one.coserve.warning or ""))
            free(1 << 40)
            backend.holds = False
            assert (await scene.ends(batch.id)).status == "completed"


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("{root}/files/file-1 cannot be read", "files/file-1 cannot be read"),
        ("cannot use {root}: no space", "cannot use the data directory: no space"),
        ("checking file-1 ended with 1: /usr/bin/python3: killed", "python3: killed"),
        ("'/opt/app/lib.py', line 3", "'lib.py', line 3"),
        ("less than 5 bytes/s; see https://a.example/b/c", "5 bytes/s; see https://a.example/b/c"),
    ],
)
def test_clients_are_told_no_path_of_the_server(message: str, told: str, tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path)
    shown = directory.told(StorageError(message.format(root=tmp_path)))
    assert shown.endswith(told)
    assert str(tmp_path) not in shown
