"""A batch and a file as the store keeps them, with whatever a test wants changed."""

from __future__ import annotations

from dataclasses import replace

from sglang_coserve.batch.record import FileRecord, JobRecord


def a_batch(**changes: object) -> JobRecord:
    batch = JobRecord(
        id="batch_1",
        owner="o",
        endpoint="/v1/completions",
        input_file_id="file-1",
        output_file_id="file-2",
        error_file_id="file-3",
        completion_window="1h",
        fingerprint="",
        created_at_s=0.0,
        expires_at_s=3600.0,
    )
    return replace(batch, **changes)  # type: ignore[arg-type]


def a_file(file_id: str = "file-1", owner: str = "o", **changes: object) -> FileRecord:
    file = FileRecord(
        id=file_id,
        owner=owner,
        filename="in.jsonl",
        purpose="batch",
        size_bytes=10,
        created_at_s=0.0,
        expires_at_s=None,
    )
    return replace(file, **changes)  # type: ignore[arg-type]
