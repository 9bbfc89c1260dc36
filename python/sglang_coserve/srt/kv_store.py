"""The interface to a store of KV: memory beside the device's, from which requests resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang_coserve.config import CoserveConfig
from sglang_coserve.config.coserve import NO_CHECKPOINTS
from sglang_coserve.errors import UnsupportedError

Req = Any
ScheduleBatch = Any


class KvStore:
    """A store that keeps nothing: requests that gave way are computed again.

    A scheduler calls ``computed`` after each batch, ``begin_pass`` before each plan, ``loaded`` and
    ``wants`` for waiting requests, and ``forget`` at the end of a request. SGLang's radix cache
    tells the store of everything else.
    """

    def computed(self, batch: ScheduleBatch) -> None:
        """Save KV of the offline requests of a batch whose results are processed."""

    def begin_pass(self, now_s: float) -> None:
        """Begin to load what requests wanted in the last pass; ``now_s`` is the same on all ranks.

        Loading may evict cached prefixes, so it must not begin between a plan and its execution.
        """

    def wants(self, req: Req) -> bool:
        """Return whether a request is to be admitted later, when its KV is loaded.

        The request waits, and is about to be admitted. Its KV is loaded from the next pass on.
        """
        return False

    def loaded(self, req: Req) -> bool:
        """Return False for a waiting request that still wants KV, and True for any other."""
        return True

    def forget(self, rid: str) -> None:
        """Drop what is kept of a request that has ended."""

    def figures(self) -> dict[str, Any]:
        """Return what ``/coserve/status`` says of the store (docs/kv_checkpoint.md). O(1)."""
        return {"mode": "off"}


class KvStoreSetup:
    """The steps in which an engine gets its store of KV; these are of an engine without a store.

    The methods are in the order of their calls. ``register`` and ``store`` are called in the
    process of a scheduler.
    """

    def server_settings(
        self, given: Mapping[str, Any], config: CoserveConfig, *, on_cpu: bool
    ) -> dict[str, Any]:
        """Return the fields of SGLang's ``ServerArgs`` that the store needs.

        They must be set before ``ServerArgs`` is created, which derives other fields from them.
        ``given`` are the fields that an operator has set.

        Raises:
            UnsupportedError: one line per given setting that the store cannot be combined with; or
                the settings ask for checkpoints, and there is no store.
        """
        if config.kv_checkpoint != NO_CHECKPOINTS:
            raise UnsupportedError(
                f"--kv-checkpoint {config.kv_checkpoint}: this installation has no KV checkpoints: "
                "leave the flag out"
            )
        return {}

    def check(self, server_args: Any, config: CoserveConfig, *, on_cpu: bool) -> None:
        """Refuse a ``ServerArgs``, or its model, with which the store cannot work.

        Raises:
            UnsupportedError: ``server_settings`` is not in it, or the model has other KV.
        """

    def register(self, config: CoserveConfig, *, on_cpu: bool) -> None:
        """Make SGLang's scheduler, which is not created yet, use the store's radix cache."""

    def store(self, tree_cache: Any, waited: Callable[[float], None]) -> KvStore:
        """Return the store of a scheduler with SGLang's ``tree_cache``.

        ``waited`` is called with the seconds of each wait for copies.
        """
        return KvStore()
