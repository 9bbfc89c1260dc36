"""The data directory: one server at a time, and no names but ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from batch.scenarios import opened, play
from sglang_coserve.batch.data_directory import DataDirectory
from sglang_coserve.errors import StartupError


class TestDirectory:
    def test_two_servers_do_not_share_it(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with (await opened(tmp_path)).service:
                with pytest.raises(StartupError, match="in use by another server"):
                    await opened(tmp_path)
            async with (await opened(tmp_path)).service:
                pass

        play(scenario())

    def test_it_must_be_writable(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        for bad in (tmp_path / "file", Path("/proc/coserve")):
            with pytest.raises(StartupError, match="name another --coserve-data-dir"):
                play(opened(bad))

    def test_a_damaged_database_unlocks_it_again(self, tmp_path: Path) -> None:
        (tmp_path / "coserve.sqlite").write_bytes(b"nonsense" * 1000)
        for _ in range(2):
            with pytest.raises(StartupError, match="cannot use the batch database"):
                play(opened(tmp_path))

    def test_ids_are_the_only_names(self, tmp_path: Path) -> None:
        directory = DataDirectory(tmp_path)
        for name in ("../x", "", "file-", "file-" + "g" * 24, "file-" + "0" * 25, "/etc/passwd"):
            with pytest.raises(AssertionError):
                directory.file(name)
