"""SGLang's tokenizer manager with notifications of weight updates and of the engine's end."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final

from sglang_coserve.guard.process_health import is_stop_asked, uvicorn_server
from sglang_coserve.guard.tokenizer_manager import GuardedTokenizerManager
from sglang_coserve.lines.backend import ChangeListeners
from sglang_coserve.srt import compat


class WeightUpdates:
    """Identifies the loaded weights, and signals while they are being updated."""

    def __init__(self) -> None:
        self._run = secrets.token_hex(8)
        self._count = 0
        self._num_pending = 0
        self._is_paused = False
        self.cache_key = ""
        """Cache namespace for the prefixes of batch lines. Not empty once weights were updated
        without flushing the cache, which then holds KV of other weights."""

        self.listeners = ChangeListeners()
        """Told when an exchange is about to wait for the end of all requests in flight."""

        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def name(self) -> str:
        """Unique name of the current weights, across servers; empty for the initial weights."""
        return f"{self._run}/{self._count}" if self._count else ""

    @property
    def is_changing(self) -> bool:
        """True while weights are updated, or generation is paused for an update."""
        return not self._settled.is_set()

    async def settled(self) -> None:
        """Wait while ``is_changing``."""
        await self._settled.wait()

    @contextmanager
    def updating(self, *, empties_cache: bool) -> Generator[None]:
        """Mark the weights as being updated in this context, whether or not that succeeds.

        No request is served meanwhile. Those in flight have ended before, were aborted,
        or are paused and continue with the new weights.
        """
        self._num_pending += 1
        try:
            self._settled.clear()
            if not self._is_paused:
                self.listeners.tell()
            yield
        finally:
            # A failed update may have changed some of the weights.
            self._count += 1
            self.cache_key = "" if empties_cache else self.name
            self._num_pending -= 1
            self._settle()

    def pause(self) -> None:
        """Record that generation was paused."""
        self._is_paused = True
        self._settled.clear()

    def resume(self) -> None:
        """Record that generation was resumed."""
        self._is_paused = False
        self._settle()

    def _settle(self) -> None:
        if not self._num_pending and not self._is_paused:
            self._settled.set()


_IDLE_TIMEOUT_S: Final = 60.0
"""More than the scheduler needs to remove aborted requests."""

_LAST_ANSWERS_S: Final = 5
"""More than a refusal takes; what is unanswered then had no engine any more."""


class UpdatingTokenizerManager(GuardedTokenizerManager):
    """Reports weight updates to ``coserve_weights``, and a crash to ``coserve_on_death``."""

    served_model_name: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.coserve_weights = WeightUpdates()
        self.coserve_on_death: Callable[[], None] | None = None
        """Called when the engine has crashed, right before this process ends."""
        self.coserve_has_stopped = False
        """After SIGTERM all requests were answered and the schedulers have ended."""

        for name in compat.UPDATE_COMMUNICATORS:
            setattr(self, name, self._once_idle(getattr(self, name)))

    def dump_requests_before_crash(self, *args: Any, **kwargs: Any) -> None:
        """Report the crash: SGLang calls this after every failure that ends its processes."""
        if self.coserve_on_death is not None and not is_stop_asked(self):
            self.coserve_on_death()
        super().dump_requests_before_crash(*args, **kwargs)

    def set_server_stop_hook(self, hook: Callable[[], None]) -> None:
        """Have ``hook`` end the HTTP server after the schedulers have ended.

        What comes then over a connection that is open, a router's say, would never be answered, and
        the server would wait for it for ever: it is refused, and Uvicorn waits for seconds only.
        """

        def stop() -> None:
            self.coserve_has_stopped = True
            if (server := uvicorn_server()) is not None:
                server.config.timeout_graceful_shutdown = _LAST_ANSWERS_S
            hook()

        super().set_server_stop_hook(stop)

    async def update_weights_from_disk(self, obj: Any, *args: Any) -> Any:
        """See ``TokenizerManager``; the model keeps the name that clients call it by."""
        name = self.served_model_name
        with self.coserve_weights.updating(empties_cache=obj.flush_cache):
            try:
                return await super().update_weights_from_disk(obj, *args)
            finally:
                self.served_model_name = name

    async def update_weights_from_distributed(self, obj: Any, *args: Any) -> Any:
        """See ``TokenizerManager``."""
        with self.coserve_weights.updating(empties_cache=obj.flush_cache):
            return await super().update_weights_from_distributed(obj, *args)

    async def update_weights_from_tensor(self, obj: Any, *args: Any) -> Any:
        """See ``TokenizerManager``."""
        with self.coserve_weights.updating(empties_cache=obj.flush_cache):
            return await super().update_weights_from_tensor(obj, *args)

    async def update_weights_from_ipc(self, obj: Any, *args: Any) -> Any:
        """See ``TokenizerManager``."""
        with self.coserve_weights.updating(empties_cache=obj.flush_cache):
            return await super().update_weights_from_ipc(obj, *args)

    async def pause_generation(self, obj: Any) -> None:
        """See ``TokenizerManager``."""
        self.coserve_weights.pause()
        try:
            await super().pause_generation(obj)
        finally:
            self._resume_unless_paused()

    async def continue_generation(self, obj: Any) -> None:
        """See ``TokenizerManager``."""
        try:
            await super().continue_generation(obj)
        finally:
            self._resume_unless_paused()

    def _resume_unless_paused(self) -> None:
        """Follow SGLang, however a call of it has ended."""
        if not self.is_pause:
            self.coserve_weights.resume()

    async def _wait_for_model_update_from_disk(self, obj: Any) -> Any:
        return await self._once_idle(super()._wait_for_model_update_from_disk)(obj)

    def _once_idle(self, update: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return ``update`` preceded by a wait until the scheduler has removed aborted requests.

        SGLang waits only until no client awaits an answer. Aborted requests may then still be in
        the scheduler for a step, and its process dies if it cannot flush its cache.
        """

        async def update_once_idle(obj: Any) -> Any:
            if obj.flush_cache and not self.is_pause:
                flushed = await self.flush_cache(timeout_s=_IDLE_TIMEOUT_S)
                if not flushed.success:
                    raise ValueError(
                        f"the engine was not idle after {_IDLE_TIMEOUT_S:.0f} s, so that its"
                        " weights cannot be exchanged: try again"
                    )
            return await update(obj)

        return update_once_idle
