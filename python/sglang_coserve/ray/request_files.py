"""Files of requests as a dataset, of which a later run reads only what has no result yet."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
import ray.data
from ray.data.checkpoint import CheckpointConfig
from ray.data.datasource import FileBasedDatasource

from sglang_coserve.jsonl.lines import is_blank, read_lines

__all__ = ["LINE", "REQUEST", "read_requests"]

LINE: Final = "line"
REQUEST: Final = "request"

_SCHEMA: Final = pa.schema([(LINE, pa.string()), (REQUEST, pa.binary())])

_MAX_LINE_BYTES: Final = 64 << 20
"""The most that any engine takes; each says itself what it takes."""

_PIECE_BYTES: Final = 1 << 20
"""Lines are handed on as soon as they are so many bytes together."""


def read_requests(paths: str | Sequence[str], *, checkpoint: str | None = None) -> ray.data.Dataset:
    """Return the lines of files in the input format of the Batch API.

    Rows have a ``line``, which names the file and the number of the line, and the ``request``,
    its bytes; what they say is looked at by ``complete``. Blank lines are left out.

    Args:
        paths: Files or directories, on this machine's disk or wherever Ray Data reads.
        checkpoint: A directory that all nodes share, in which Ray notes the lines whose results
            are written. The same job, started again on it, goes on with the others; the files
            must not change in between. It stays when the job is complete: remove it, and
            the results, to have all lines answered again.
    """
    dataset: ray.data.Dataset = ray.data.read_datasource(_RequestFiles(paths))
    if checkpoint is not None:
        # Of this dataset alone, and what is made of it. Set for the whole process, as Ray's
        # documentation has it, it would also hold for datasets that have no such column.
        dataset.context.checkpoint_config = CheckpointConfig(
            id_column=LINE, checkpoint_path=checkpoint, delete_checkpoint_on_success=False
        )
    return dataset


class _RequestFiles(FileBasedDatasource):
    def __init__(self, paths: str | Sequence[str]) -> None:
        super().__init__(paths if isinstance(paths, str) else list(paths))

    def _read_stream(self, f: pa.NativeFile, path: str) -> Iterator[pa.Table]:
        rows: list[dict[str, object]] = []
        size_bytes = 0
        for line in read_lines(io.BufferedReader(f), _MAX_LINE_BYTES):
            if is_blank(line.content):
                continue
            # Too long to be held: ``complete`` gives it its error.
            rows.append({LINE: f"{path}:{line.number}", REQUEST: line.content})
            size_bytes += line.size_bytes
            if size_bytes >= _PIECE_BYTES:
                yield pa.Table.from_pylist(rows, _SCHEMA)
                rows, size_bytes = [], 0
        if rows:
            yield pa.Table.from_pylist(rows, _SCHEMA)
