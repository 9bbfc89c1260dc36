"""A lock ends when its holder says so, whoever else has the descriptor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_coserve.lines.file_lock import lock_file, unlock_file


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    held = lock_file(tmp_path / "lock", 0o600)
    with pytest.raises(BlockingIOError):
        lock_file(tmp_path / "lock", 0o600)
    unlock_file(held)
    unlock_file(lock_file(tmp_path / "lock", 0o600))


def test_a_copy_in_a_process_that_is_being_started_does_not_hold_it(tmp_path: Path) -> None:
    held = lock_file(tmp_path / "lock", 0o600)
    copy = os.dup(held)
    try:
        unlock_file(held)
        unlock_file(lock_file(tmp_path / "lock", 0o600))
    finally:
        os.close(copy)
