"""Ends offline requests when their LoRA adapter is unloaded.

SGLang unloads an adapter when the last request with it has ended. Offline requests wait for hours,
and until then no other adapter is loaded: online requests that need one wait, too.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from sglang_coserve.srt.marks.request_marks import is_offline

_ADAPTER: Final = "coserve_offline_adapter"
"""Attribute of SGLang's state of an offline request: the id of the request's adapter."""

_POLL_S: Final = 0.1


class AdapterUnloads:
    """Aborts offline requests with an adapter for as long as the adapter waits to be unloaded."""

    def __init__(self, manager: Any) -> None:
        """``manager`` is SGLang's tokenizer manager, which has its registry of adapters."""
        self._manager = manager
        self._wait = manager.lora_registry.wait_for_unload
        manager.lora_registry.wait_for_unload = self._end_and_wait

    def sending(self, tokenized: Any) -> None:
        """Note a request that is about to be sent to the engine. O(1)."""
        if tokenized.lora_id is not None and is_offline(tokenized):
            setattr(self._manager.rid_to_state[tokenized.rid], _ADAPTER, tokenized.lora_id)

    async def _end_and_wait(self, lora_id: str) -> None:
        """Wait until no request has the adapter. O(requests) ten times a second."""
        waiting = asyncio.ensure_future(self._wait(lora_id))
        try:
            while not waiting.done():
                self._abort(lora_id)
                await asyncio.wait({waiting}, timeout=_POLL_S)
            await waiting
        finally:
            waiting.cancel()

    def _abort(self, lora_id: str) -> None:
        # Requests that were being tokenized come later. SGLang loses count of an adapter if one
        # choice of a request is not sent, so requests are sent first, and aborted then.
        for rid, state in list(self._manager.rid_to_state.items()):
            if state.dispatched and getattr(state, _ADAPTER, None) == lora_id:
                setattr(state, _ADAPTER, None)
                self._manager.abort_request(rid)
