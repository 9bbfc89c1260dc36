"""Settings of the Batch API: those of one engine, and of a gateway before many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from sglang_coserve.config.flags import FlagSettings, flag, setting
from sglang_coserve.core.ranges import POSITIVE
from sglang_coserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BatchApiConfig(FlagSettings):
    """Settings of the Batch API, of one engine or before many; every field is a flag.

    Raises:
        ConfigError: on construction, when a value is out of its range.
    """

    coserve_data_dir: str | None = setting(
        None,
        "Directory of the Batch API, made when it is not there; for one server at a time. "
        "Without one, /v1/files and /v1/batches are off.",
        metavar="DIRECTORY",
    )
    batch_max_upload_mib: Annotated[int, POSITIVE] = setting(
        200, "Largest file that may be uploaded for a batch, in MiB.", type=int, metavar="MIB"
    )
    batch_max_lines: Annotated[int, POSITIVE] = setting(
        50_000, "Most requests in one batch.", type=int, metavar="N"
    )
    batch_max_in_flight: Annotated[int, POSITIVE] = setting(
        512,
        "Most lines of all batches at once; of a gateway 65536.",
        type=int,
        metavar="N",
    )
    batch_max_in_flight_mib: Annotated[int, POSITIVE] = setting(
        64,
        "Most MiB of these lines, for each engine. A larger line goes alone.",
        type=int,
        metavar="MIB",
    )
    batch_max_active: Annotated[int, POSITIVE] = setting(
        256, "Most unfinished batches, of all API keys together.", type=int, metavar="N"
    )
    batch_max_active_per_key: Annotated[int | None, POSITIVE] = setting(
        None,
        "Most unfinished batches of one API key. By default as many as are still free of "
        "--batch-max-active.",
        type=int,
        metavar="N",
    )
    batch_max_stored_gib_per_key: Annotated[float | None, POSITIVE] = setting(
        None,
        "Most that the files of one API key may take on the disk, in GiB, uploads and results "
        "together. By default as much as is still free.",
        type=float,
        metavar="GIB",
    )
    batch_max_files_per_key: Annotated[int, POSITIVE] = setting(
        100_000,
        "Most files of one API key, uploads and results together.",
        type=int,
        metavar="N",
    )
    batch_webhook_url: str | None = setting(
        None,
        "Address that is told when a batch has ended. The secret to sign with is in the "
        "environment variable COSERVE_WEBHOOK_SECRET.",
        is_secret=True,
        metavar="URL",
    )

    def __post_init__(self) -> None:
        FlagSettings.__post_init__(self)
        changed = self.changed()
        for name in sorted(changed):
            if name.startswith("batch_") and "coserve_data_dir" not in changed:
                raise ConfigError(
                    f"{flag(name)} has no effect alone: add {flag('coserve_data_dir')}"
                )
