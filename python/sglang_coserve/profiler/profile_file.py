"""Reads and writes profile files."""

from __future__ import annotations

from pathlib import Path

from sglang_coserve.core.latency_model import LatencyProfile
from sglang_coserve.durable_files import replace
from sglang_coserve.errors import InputFileError

__all__ = ["load_profile", "write_profile"]


def load_profile(path: Path) -> LatencyProfile:
    """Read a profile that ``coserve profile`` wrote.

    Raises:
        InputFileError: the file cannot be read, or is not a profile.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputFileError(
            f"{path}: cannot be read as a latency profile: {error}: "
            "make one with coserve profile --model-path … -o FILE"
        ) from error
    return LatencyProfile.from_json(text, str(path))


def write_profile(profile: LatencyProfile, path: Path) -> None:
    """Write a profile: a reader sees the old file or the new one, also after a power failure."""
    replace(path, lambda file: file.write(profile.to_json().encode()), 0o666)
