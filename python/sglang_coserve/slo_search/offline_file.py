"""Writes the offline requests of a simulation as a batch file for a real server."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from sglang_coserve.core.offline_queue import unpack_tokens
from sglang_coserve.errors import InputFileError
from sglang_coserve.simulator.assemble import offline_requests
from sglang_coserve.slo_search.load import SearchLoad
from sglang_coserve.workload import FIRST_TEXT_TOKEN_ID, detect_format

__all__ = ["offline_file"]


def offline_file(load: SearchLoad, path: Path, *, num_lines: int, vocab_size: int) -> Path:
    """Return the user's batch file, or write one to ``path`` with the lengths of the load.

    The prompts are token ids with the common prefixes of the trace, if
    any; outputs have exactly the same lengths as in the simulation.

    Raises:
        CoserveError: the offline requests cannot be read.
    """
    given = Path(load.offline)
    if given.is_file() and not _is_trace(given):
        return given
    make = offline_requests(
        load.offline, max_context_tokens=load.max_context_tokens, seed=load.seed
    )
    with path.open("w", encoding="utf-8") as file:
        for number, request in enumerate(islice(make(), num_lines)):
            first, num_ids = FIRST_TEXT_TOKEN_ID, vocab_size - FIRST_TEXT_TOKEN_ID
            body = {
                "model": "default",
                "prompt": [first + i % num_ids for i in unpack_tokens(request.prompt)],
                "max_tokens": request.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            line = {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/completions",
                "body": body,
            }
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    return path


def _is_trace(path: Path) -> bool:
    try:
        detect_format(path)
    except InputFileError:
        return False
    return True
