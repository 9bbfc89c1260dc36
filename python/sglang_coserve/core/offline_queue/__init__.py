"""The order in which waiting offline requests are served.

- ``queue`` decides which request is next: starvation, deadlines, prefix or age.
- ``prefix_trie`` keeps requests with a common prefix side by side.
- ``time_order`` sorts them by a moment: arrival or latest start.
- ``request``, ``tokens`` and ``config`` are the values that go in.
"""

from sglang_coserve.core.offline_queue.config import OfflineQueueConfig
from sglang_coserve.core.offline_queue.queue import OfflineQueue
from sglang_coserve.core.offline_queue.request import QueuedRequest
from sglang_coserve.core.offline_queue.tokens import PackedTokens, pack_tokens, unpack_tokens

__all__ = [
    "OfflineQueue",
    "OfflineQueueConfig",
    "PackedTokens",
    "QueuedRequest",
    "pack_tokens",
    "unpack_tokens",
]
