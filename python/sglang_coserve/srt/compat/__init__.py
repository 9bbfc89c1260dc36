"""What depends on the version of SGLang: differences, replacements, the check at start-up.

- ``versions``: the supported versions. At start-up its ``check_version`` refuses all others.
- ``v17``, ``v23``: functions that differ between versions; ``by_version`` chooses one of the two.
- ``requests``, ``settings``: functions that are the same for all versions.

The register ``scripts/seams/seams.txt`` lists the names of SGLang that co-serving uses beyond its
public classes, each with a reason. ``scripts/sglang-seams VERSION`` looks them up in the sources of
a version (docs/upgrading.md). An attribute that all versions have (``waiting_queue``, …) is used
where it is needed; an attribute that some versions lack is used in this package alone.
"""

from __future__ import annotations

from typing import Any

from sglang_coserve.replacements import replace as replace
from sglang_coserve.srt.compat import by_version
from sglang_coserve.srt.compat.by_version import *  # noqa: F403
from sglang_coserve.srt.compat.requests import *  # noqa: F403
from sglang_coserve.srt.compat.settings import *  # noqa: F403
from sglang_coserve.srt.compat.versions import check_version as check_version
from sglang_coserve.srt.compat.versions import installed_version as installed_version
from sglang_coserve.srt.compat.versions import start_up_line as start_up_line

UPDATE_COMMUNICATORS = (
    "update_weights_from_distributed_communicator",
    "update_weights_from_ipc_communicator",
    "update_weights_from_tensor_communicator",
)
"""What a tokenizer manager sends weight updates with, once no request is in flight."""


def is_first_rank(scheduler: Any) -> bool:
    """Return whether this is the rank that receives the requests and reports for all."""
    ranks = by_version.parallel(scheduler)
    return bool(ranks.tp_rank == 0 and ranks.pp_rank == 0)


def num_ranks(scheduler: Any) -> int:
    """Return how many ranks decide the same: of all stages, tensor-parallel ones in each."""
    ranks = by_version.parallel(scheduler)
    return int(ranks.tp_size * ranks.pp_size)
