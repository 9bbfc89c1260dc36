"""The directory in which engines leave the KV of requests for each other: a file for each rank.

A file is in the safetensors format. What it holds is KV of somebody's prompt, so directory and
files are the owner's alone, and files expire. A file counts only as a whole, for the model, the
layout and the tokens that it was written for: anything else is as good as no file.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from sglang_coserve.errors import StartupError

EXPIRES_S: Final = 4 * 3600.0
"""A line goes on within seconds, or when there is an engine for it again. After so long even that
is no more to be expected."""

_NAME: Final = re.compile(r"[0-9a-f]{32}")
_SUFFIX: Final = ".kv.safetensors"
_PARTIAL: Final = ".partial"
_MOST_HEADER_BYTES: Final = 1 << 16


class KvFileError(Exception):
    """There is no such file, or not the one that was meant."""


def is_kv_name(name: str) -> bool:
    """Return whether ``name`` is one under which KV may be left."""
    return _NAME.fullmatch(name) is not None


class KvDirectory:
    """The files of one rank in a directory. Every call may block for as long as the disk does."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._rank = rank

    @staticmethod
    def check(path: Path) -> None:
        """Make the directory if there is none.

        Raises:
            StartupError: it cannot be used, or others may look into it.
        """
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = path.stat()
        except OSError as error:
            raise StartupError(f"--kv-move-dir {path}: {error.strerror}") from error
        if found.st_uid != os.geteuid():
            raise StartupError(
                f"--kv-move-dir {path} belongs to another user, who could read prompts from it: "
                "give it to the one that the engines run as"
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise StartupError(
                f"--kv-move-dir {path} is open to others, and holds what prompts can be read from: "
                f"chmod 700 {path}"
            )
        if not os.access(path, os.W_OK | os.X_OK):
            raise StartupError(f"--kv-move-dir {path} cannot be written to")

    def write(
        self, name: str, identity: str, kv: torch.Tensor, is_wanted: Callable[[], bool]
    ) -> None:
        """Leave ``kv`` (uint8) under ``name``, if it is still wanted when all is written.

        It is not synced: ``take`` refuses what a power failure leaves, which is computed again.

        Raises:
            OSError, safetensors' own error: the file cannot be written, and none is left.
        """
        path = self._file(name)
        partial = path.with_name(path.name + _PARTIAL)
        metadata = {"identity": identity, "crc32": str(zlib.crc32(kv.numpy()))}
        try:
            os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            save_file({"kv": kv}, partial, metadata)
            partial.chmod(0o600)
            if is_wanted():
                partial.rename(path)
                if not is_wanted():
                    # Whoever does not want it any more may have removed it before the rename.
                    path.unlink(missing_ok=True)
        finally:
            partial.unlink(missing_ok=True)

    def take(self, name: str, identity: str, kv_bytes: int) -> torch.Tensor:
        """Return the KV (uint8) under ``name``, and remove the file.

        Raises:
            KvFileError: there is none, or not of ``identity`` and so many bytes, or a broken one.
        """
        path = self._file(name)
        try:
            # Not mapped: a file that is cut short meanwhile would end the process.
            with path.open("rb", buffering=0) as file:
                path.unlink(missing_ok=True)
                size_bytes = os.fstat(file.fileno()).st_size
                if size_bytes > kv_bytes + _MOST_HEADER_BYTES:
                    raise KvFileError(f"{path} is larger than it should be")
                content = bytearray(size_bytes)
                view, read_bytes = memoryview(content), 0
                while read_bytes < size_bytes and (part := file.readinto(view[read_bytes:])):
                    read_bytes += part
        except OSError as error:
            raise KvFileError(f"{path}: {error.strerror}") from error
        return _kv(path, content, identity, kv_bytes)

    def remove(self, name: str) -> None:
        """Remove the file under ``name``, if there is one."""
        self._file(name).unlink(missing_ok=True)

    def remove_expired(self, now_s: float | None = None) -> None:
        """Remove what engines have left and nobody has taken, whichever rank's it is.

        ``now_s`` is in seconds since the epoch, by default now.
        """
        oldest_s = (time.time() if now_s is None else now_s) - EXPIRES_S
        for entry in os.scandir(self._path):
            if entry.name.endswith((_SUFFIX, _SUFFIX + _PARTIAL)):
                try:
                    if entry.stat(follow_symlinks=False).st_mtime < oldest_s:
                        Path(entry).unlink(missing_ok=True)
                except FileNotFoundError:
                    continue  # Another rank was faster.

    def _file(self, name: str) -> Path:
        assert is_kv_name(name)
        return self._path / f"{name}-{self._rank}{_SUFFIX}"


def _kv(path: Path, content: bytearray, identity: str, kv_bytes: int) -> torch.Tensor:
    """Return the KV in a file, whose memory it shares."""
    start = 8 + int.from_bytes(content[:8], "little")
    try:
        header: dict[str, Any] = json.loads(content[8:start])
        metadata, entry = header["__metadata__"], header["kv"]
        found = metadata["identity"], entry["dtype"], entry["shape"]
        crc32 = int(metadata["crc32"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        # Not what it says: that may have all of the file in it.
        raise KvFileError(f"{path} is no file of KV: {type(error).__name__}") from error
    if found != (identity, "U8", [kv_bytes]) or len(content) != start + kv_bytes:
        raise KvFileError(f"{path} has KV of another model, layout or text")
    kv = torch.frombuffer(content, dtype=torch.uint8, offset=start)
    if zlib.crc32(kv.numpy()) != crc32:
        raise KvFileError(f"{path} is damaged")
    return kv
