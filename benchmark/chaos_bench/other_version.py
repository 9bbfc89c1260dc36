"""``python -m chaos_bench.other_version engine|gateway FLAGS``: one that speaks as another version.

Each message about a line has fields that this version does not know, and lacks those that have a
default where it is right.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

__all__ = ["as_other_version"]


def as_other_version(message: msgspec.Struct) -> bytes:
    """Return a message as JSON on one line, as ``messages.encode_message`` of another version."""
    return json.dumps(_fields(message), separators=(",", ":")).encode() + b"\n"


def _fields(message: msgspec.Struct) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(message):
        value = getattr(message, field.name)
        if value != field.default:
            is_message = isinstance(value, msgspec.Struct)
            found[field.encode_name] = _fields(value) if is_message else msgspec.to_builtins(value)
    return {**found, "of_another_version": {"number": 1, "list": [None, "ü"]}}


def main(role: str, flags: list[str]) -> int:
    """Run an engine or a gateway; return its exit status."""
    from sglang_coserve.http_lines import messages

    # Before the modules that take it from there are imported.
    messages.encode_message = as_other_version
    if role == "engine":
        from sglang_coserve.srt.launch import main
    else:
        from sglang_coserve.fleet.__main__ import main
    return main(flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
