"""The order in which waiting offline requests are served.

- ``queue`` chooses the next request: by starvation, deadline, length, prefix or age.
- ``prefix_trie`` orders requests by common prefixes.
- ``request`` is what waits.
"""

from sglang_coserve.core.offline_queue.queue import OfflineQueue, OfflineQueueConfig
from sglang_coserve.core.offline_queue.request import (
    PackedTokens,
    QueuedRequest,
    pack_tokens,
    unpack_tokens,
)

__all__ = [
    "OfflineQueue",
    "OfflineQueueConfig",
    "PackedTokens",
    "QueuedRequest",
    "pack_tokens",
    "unpack_tokens",
]
