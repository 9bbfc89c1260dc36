"""The database file: what is refused, and what is brought up to date."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from batch.records import a_file
from sglang_coserve.batch.store import file_rows
from sglang_coserve.batch.store.database import MIGRATIONS, open_database
from sglang_coserve.errors import StartupError


class TestOpening:
    def test_what_was_committed_is_there_again(self, tmp_path: Path) -> None:
        connection = open_database(tmp_path / "db")
        file_rows.insert(connection, a_file())
        connection.close()
        connection = open_database(tmp_path / "db")
        assert file_rows.find(connection, "o", "file-1", 0.0) == a_file()
        connection.close()

    def test_a_damaged_database_is_refused_and_left_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "db"
        connection = open_database(path)
        for number in range(200):
            file_rows.insert(connection, a_file(f"file-{number}"))
        connection.close()
        content = bytearray(path.read_bytes())
        for page in range(1, len(content) // 4096):
            content[page * 4096 : page * 4096 + 200] = b"\xff" * 200
        path.write_bytes(content)
        with pytest.raises(StartupError, match=r"cannot use .*db: .*restore it, move it away"):
            open_database(path)
        assert path.read_bytes() == content

    @pytest.mark.parametrize("content", [b"not a database at all" * 300, b"SQLite format 3\0abc"])
    def test_another_file_is_refused(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "db").write_bytes(content)
        with pytest.raises(StartupError, match="cannot use the batch database"):
            open_database(tmp_path / "db")

    def test_the_database_of_another_program_is_refused(self, tmp_path: Path) -> None:
        other = sqlite3.connect(tmp_path / "db")
        other.execute("CREATE TABLE users (name TEXT)")
        other.close()
        with pytest.raises(StartupError, match="another program"):
            open_database(tmp_path / "db")

    def test_a_later_schema_is_refused(self, tmp_path: Path) -> None:
        open_database(tmp_path / "db", [*MIGRATIONS, ["CREATE TABLE later (x)"]]).close()
        with pytest.raises(
            StartupError,
            match=rf"schema is version {len(MIGRATIONS) + 1}, this program's {len(MIGRATIONS)}",
        ):
            open_database(tmp_path / "db")

    def test_an_earlier_schema_is_brought_up_to_date(self, tmp_path: Path) -> None:
        connection = open_database(tmp_path / "db")
        file_rows.insert(connection, a_file())
        connection.close()
        later = [*MIGRATIONS, ["ALTER TABLE files ADD COLUMN note TEXT"], ["SELECT 1"]]
        connection = open_database(tmp_path / "db", later)
        assert connection.execute("SELECT id, note FROM files").fetchall() == [("file-1", None)]
        connection.close()
        open_database(tmp_path / "db", later).close()

    def test_a_migration_that_fails_changes_nothing(self, tmp_path: Path) -> None:
        open_database(tmp_path / "db").close()
        broken = [*MIGRATIONS, ["CREATE TABLE half (x)", "CREATE NONSENSE"]]
        with pytest.raises(StartupError, match="syntax error"):
            open_database(tmp_path / "db", broken)
        connection = open_database(tmp_path / "db")
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_schema")}
        connection.close()
        assert "half" not in names

    def test_a_directory_that_is_not_there_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(StartupError, match="unable to open"):
            open_database(tmp_path / "gone" / "db")
