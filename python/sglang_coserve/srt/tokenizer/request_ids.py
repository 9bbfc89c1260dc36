"""Ids of requests in the engine, by the ``x-request-id`` that their client sent or was given."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from asgi_correlation_id import correlation_id

_MOST_IDS: Final = 1 << 13
"""Of the newest requests: 8 MB at most. An older request has no step that is kept, in general."""

_MOST_OF_ONE: Final = 16
"""Requests of one ``x-request-id``: prompts and choices of one call, or a client's mistake."""


class RequestIds:
    """Knows the ids of the last requests.

    The id of an OpenAI answer is the engine's id of its request, or of its first choice. Answers of
    Anthropic's and Ollama's routes have other ids.
    """

    def __init__(self) -> None:
        self._engine_ids: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def sending(self, rid: str) -> None:
        """Note the engine's id of a request that is sent for the client of this context. O(1)."""
        sent_id = correlation_id.get()
        if sent_id is None or sent_id == rid:  # A batch's line has one id.
            return
        ids = self._engine_ids.get(sent_id, ())
        self._engine_ids[sent_id] = (*ids, rid)[-_MOST_OF_ONE:]
        self._engine_ids.move_to_end(sent_id)
        if len(self._engine_ids) > _MOST_IDS:
            self._engine_ids.popitem(last=False)

    def engine_ids(self, request_id: str) -> Sequence[str]:
        """Return the ids in the engine of requests with an id of either kind, oldest first."""
        return list(dict.fromkeys((*self._engine_ids.get(request_id, ()), request_id)))
