"""The interface to the checks of requests, which keep one request from harming the others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from pydantic import TypeAdapter

from sglang_coserve.jsonl.body_limits import BodyLimits


class RequestGuard:
    """A guard that checks nothing: requests are taken as SGLang takes them.

    It is for servers whose clients are all trusted. The methods of the server's process come first.
    """

    def close_routes(self, app: Any, *, api_key: str | None, admin_api_key: str | None) -> None:
        """Leave only decided routes in SGLang's app, and let no request through to any other."""

    def install_in_server(
        self,
        http_server: Any,
        *,
        free_prefixes: tuple[str, ...] = (),
        trusts_templates: bool = False,
    ) -> None:
        """Bound the bodies of SGLang's module ``http_server``, for the routes its app has by now.

        Args:
            http_server: the module.
            free_prefixes: prefixes of paths whose routes bound by themselves what they read.
            trusts_templates: whether a request may bring a chat template.
        """

    def tokenizer_manager(self, base: Any) -> Any:
        """Return the base class of our tokenizer manager, a subclass of SGLang's.

        The class has ``guard_with(settings, media_sources)``, and its ``generate_request`` serves
        what was checked with ``serve``.
        """

        class Unguarded(base):  # type: ignore[misc]
            """SGLang's tokenizer manager, without a check."""

            def guard_with(self, settings: Any, media_sources: str) -> None:
                """Take every medium and grammar as it is."""

            async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
                """Serve a request ``obj`` of SGLang's and yield its outputs."""
                async with aclosing(self.serve(obj, request)) as outputs:
                    async for output in outputs:
                        yield output

            def serve(self, obj: Any, request: Any) -> Any:
                """Serve a request; return an async generator of its outputs."""
                return super().generate_request(obj, request)

        return Unguarded

    def body_limits(self, manager: Any) -> BodyLimits:
        """Return the limits of bodies and lines for the model of a tokenizer manager."""
        return BodyLimits()

    def body_validator(self, adapter: TypeAdapter[Any]) -> Any:
        """Return what validates bodies with ``validate_python``."""
        return adapter

    def install_in_scheduler(self, processors_of: Any) -> None:
        """Replace the parts of SGLang in this process through which one request stalls the others.

        To be called before the scheduler is created. ``processors_of`` finds a batch's custom
        logit processors.
        """

    def grammar_cache(self, cache: Any) -> Any:
        """Return the cache of compiled grammars that takes the place of SGLang's ``cache``."""
        return cache

    def check_logit_processor(self, recv_req: Any) -> None:
        """Check a request's custom logit processor in the scheduler.

        Raises:
            ValueError: it cannot be made.
        """

    def mend_results(self, batch: Any, result: Any) -> None:
        """Correct the results of a batch before SGLang reads them; end unusable requests."""
