"""The names in a recording's lines: what the encoder and the decoder agree on.

Line 1 is an object with ``format``, ``version``, ``policy``, ``slos``, ``engine``
(the size of the baseline's), ``config`` and ``profile`` (a latency profile). Every other
line is an event under its name:

- ``added``, ``cached``, ``started``, ``restored``, ``finished``: the fields of the event.
- ``arrived``: ``request``, by number; ``cached_tokens``; and ``new``, what does not change
  of the requests seen for the first time. Lines refer to them by number, counted from 0
  over the whole recording until they finish.
- ``planned``: ``engine``, the snapshot without its rows; ``rows``, ``waiting`` and ``elsewhere``,
  by column, null when there are none; ``new``; ``cached_tokens``; and ``plan``, its fields
  that are not those of an empty plan.
- ``updated``: ``result``, its fields that are not those of an empty result, but for
  ``served``, which is by column; and ``new``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from sglang_coserve.core.recording.events import (
    Arrived,
    Cached,
    Finished,
    NoRoom,
    OfflineAdded,
    Planned,
    Restored,
    Started,
    Updated,
)
from sglang_coserve.core.request import RequestState

__all__ = ["EVENTS", "FORMAT", "STATE_LETTERS", "VERSION"]

FORMAT: Final = "coserve plans"
VERSION: Final = 7

EVENTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "arrived": Arrived,
        "added": OfflineAdded,
        "planned": Planned,
        "started": Started,
        "updated": Updated,
        "restored": Restored,
        "finished": Finished,
        "cached": Cached,
        "no_room": NoRoom,
    }
)

STATE_LETTERS: Final[Mapping[RequestState, str]] = MappingProxyType(
    {
        RequestState.WAITING: "W",
        RequestState.PREFILLING: "P",
        RequestState.PARKED: "K",
        RequestState.DECODING: "D",
        RequestState.PAUSED: "S",
        RequestState.FINISHED: "F",
        RequestState.ABORTED: "A",
    }
)
