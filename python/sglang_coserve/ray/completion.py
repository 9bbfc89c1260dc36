"""From a dataset of requests to one of results."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Final

import pyarrow as pa
import ray
import ray.data
from anyio.from_thread import start_blocking_portal
from ray.data import ActorPoolStrategy, Dataset
from ray.data.checkpoint import CheckpointConfig
from ray.data.datasource import FileBasedDatasource

from sglang_coserve.errors import ConfigError
from sglang_coserve.fleet.discovery import EngineList, EngineSource
from sglang_coserve.fleet.options import engine_key_of
from sglang_coserve.jsonl.lines import is_blank, read_lines
from sglang_coserve.lines.result_record import error_message
from sglang_coserve.ray.fleet_lines import Answer, FleetLines

_RESULT: Final = pa.schema(
    [
        ("custom_id", pa.string()),
        ("status_code", pa.int32()),
        ("response", pa.string()),
        ("error", pa.string()),
    ]
)
"""Named with their types: of a block in which all lines succeeded Ray would guess another type for
the errors, and the files of the results would not be one dataset."""


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


def complete(
    requests: Dataset,
    *,
    engines: Sequence[str] | EngineSource,
    admin_key: str | None = None,
    actors: int = 1,
    lines_in_flight: int = 2048,
    lines_per_block: int = 64,
    no_engine_timeout_s: float = 300.0,
) -> Dataset:
    """Return the results of ``requests``, in the offline class of all engines.

    Rows of ``requests`` have a column ``request``: a line of the Batch API's input format, as
    text or bytes. Instead of it those of the results have ``custom_id``; ``status_code`` and
    ``response``, the answer as JSON text, both null without an answer; and ``error``, null
    when the line was served. Other columns stay as they are. Every row has a result: what is
    wrong with a line is in its ``error``.

    A line whose engine ends goes on elsewhere, after the tokens it had, as in a gateway.
    What Ray does again, because one of its processes ended, are whole blocks.

    Args:
        requests: As of ``read_requests``, or any other.
        engines: Their addresses, ``http://HOST:PORT``, or who knows them: ``DnsName``, ``Router``.
        admin_key: The engines' ``--admin-api-key``; by default ``COSERVE_ENGINE_ADMIN_KEY``.
        actors: Processes that speak with the engines.
        lines_in_flight: Lines that one actor has at a time, at engines or waiting for them. As a
            block is done with its slowest line, several times what the engines can run.
        lines_per_block: Lines that are handed on, written and done again together.
        no_engine_timeout_s: How long there may be no engine until the job fails.

    Raises:
        ConfigError: an argument cannot be used.
    """
    if isinstance(engines, str):
        raise ConfigError(f"engines={engines!r}: use a list of addresses")
    source = EngineList(engines) if isinstance(engines, Sequence) else engines
    key = engine_key_of(admin_key, "pass admin_key=KEY")
    for name, value in (
        ("actors", actors),
        ("lines_in_flight", lines_in_flight),
        ("lines_per_block", lines_per_block),
        ("no_engine_timeout_s", no_engine_timeout_s),
    ):
        if not value > 0:
            raise ConfigError(f"{name}={value}: use more than 0")
    blocks = max(1, lines_in_flight // lines_per_block)
    return requests.repartition(target_num_rows_per_block=lines_per_block).map_batches(
        _CompleteLines,
        fn_constructor_args=[source, key, no_engine_timeout_s],
        # A call makes one block of one. Ray counts on it that a call that it makes again ends
        # in the same blocks as before, or rows would be lost or doubled.
        batch_size=None,
        batch_format="pyarrow",
        # It waits for engines. With a CPU each, actors and Ray's own would wait for each other
        # on a small machine.
        num_cpus=0,
        compute=ActorPoolStrategy(
            size=actors,
            max_tasks_in_flight_per_actor=blocks,
            max_concurrent_calls_per_actor=blocks,
            enable_true_multi_threading=True,
        ),
    )


class _CompleteLines:
    """One actor. Called for several blocks at a time, each in a thread of Ray's."""

    def __init__(self, source: EngineSource, admin_key: str, no_engine_timeout_s: float) -> None:
        self._ending = ExitStack()
        # Not Ray's loop, which stops where results wait for who writes them: engines that are
        # not listened to for so long are taken for dead.
        self._portal = self._ending.enter_context(start_blocking_portal(name="engines"))
        job = f"ray-{ray.get_runtime_context().get_job_id()}"
        lines = FleetLines(source, admin_key, job=job, no_engine_timeout_s=no_engine_timeout_s)
        self._lines = self._ending.enter_context(self._portal.wrap_async_context_manager(lines))

    def __del__(self) -> None:
        """Leave the engines: Ray has no other word for the end of an actor."""
        # The thread does not run any more where Python itself ends.
        if not sys.is_finalizing():
            self._ending.close()

    def __call__(self, block: pa.Table) -> pa.Table:
        """Return ``block`` with the results of its requests."""
        if REQUEST not in block.column_names:
            raise ConfigError(f"requests have no column {REQUEST!r}, but {block.column_names}")
        lines = [_content(value) for value in block[REQUEST].to_pylist()]
        answers = self._portal.call(self._lines.answers, lines)
        results = pa.Table.from_pylist([_row(answer) for answer in answers], _RESULT)
        replaced = [name for name in (REQUEST, *_RESULT.names) if name in block.column_names]
        block = block.drop_columns(replaced)
        for field, column in zip(_RESULT, results.columns, strict=True):
            block = block.append_column(field, column)
        return block


def _content(request: object) -> bytes | None:
    """Return a line as bytes; anything but text ends as an error of its row."""
    if isinstance(request, str):
        return request.encode(errors="surrogatepass")
    return request if isinstance(request, bytes) else None


def _row(answer: Answer) -> dict[str, object]:
    result = answer.result
    is_answered = bool(result.status_code)
    error = None
    if not result.is_ok:
        error = error_message(result.body)
        if is_answered:
            error = f"HTTP {result.status_code}: {error}"
    return {
        "custom_id": answer.custom_id,
        "status_code": result.status_code if is_answered else None,
        "response": json.dumps(result.body) if is_answered else None,
        "error": error,
    }
