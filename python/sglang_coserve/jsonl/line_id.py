"""The process that finds the ``custom_id`` of a line that is too large to be parsed in the server.

``python -m sglang_coserve.jsonl.line_id FILE OFFSET ENDPOINT`` prints it as JSON. The line
begins at ``OFFSET`` and has been checked before.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import orjson

from sglang_coserve.jsonl.request_line import parse_request_line

__all__ = ["main"]

_UTF8_BOM = b"\xef\xbb\xbf"


def main(path: str, offset: str, endpoint: str) -> None:
    """Print the id."""
    os.nice(10)  # Whatever serves requests is more urgent; with 19 a busy host never gets here.
    with Path(path).open("rb") as file:
        file.seek(int(offset))
        line = file.readline().removeprefix(_UTF8_BOM)
    sys.stdout.buffer.write(
        orjson.dumps(parse_request_line(line.rstrip(b"\r\n"), endpoint).custom_id)
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
