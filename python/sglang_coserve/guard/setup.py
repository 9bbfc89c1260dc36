"""The guard as ``srt.optional_parts`` registers it; each part is imported when it is needed."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from sglang_coserve.jsonl.body_limits import BodyLimits
from sglang_coserve.request_guard import RequestGuard


class Guard(RequestGuard):
    """Checks every request: its route, fields, sizes, and what it does in the scheduler."""

    def close_routes(self, app: Any, *, api_key: str | None, admin_api_key: str | None) -> None:
        """See ``route_table``."""
        from sglang_coserve.guard.route_table import RouteGate, decide

        decide(app, has_admin_key=bool(admin_api_key))
        # Outside of what SGLang counts requests with.
        app.add_middleware(RouteGate, api=app, api_key=api_key, admin_api_key=admin_api_key)

    def install_in_server(
        self,
        http_server: Any,
        *,
        free_prefixes: tuple[str, ...] = (),
        trusts_templates: bool = False,
    ) -> None:
        """See ``install.install_in_server``."""
        from sglang_coserve.guard.install import install_in_server

        install_in_server(
            http_server, free_prefixes=free_prefixes, trusts_templates=trusts_templates
        )

    def tokenizer_manager(self, base: Any) -> Any:
        """Return ``GuardedTokenizerManager``, which is a subclass of ``base``."""
        from sglang_coserve.guard.tokenizer_manager import GuardedTokenizerManager

        assert issubclass(GuardedTokenizerManager, base)
        return GuardedTokenizerManager

    def body_limits(self, manager: Any) -> BodyLimits:
        """See ``bodies.body_limits``."""
        from sglang_coserve.guard.bodies import body_limits

        return body_limits(manager)

    def body_validator(self, adapter: TypeAdapter[Any]) -> Any:
        """See ``bodies.FailFast``."""
        from sglang_coserve.guard.bodies import FailFast

        return FailFast(adapter)

    def install_in_scheduler(self, processors_of: Any) -> None:
        """See ``install.install_in_scheduler``."""
        from sglang_coserve.guard.install import install_in_scheduler

        install_in_scheduler(processors_of)

    def grammar_cache(self, cache: Any) -> Any:  # noqa: ARG002
        """See ``grammars.grammar_cache``."""
        from sglang_coserve.guard.grammars import grammar_cache

        return grammar_cache()

    def check_logit_processor(self, recv_req: Any) -> None:
        """See ``sampling.check_logit_processor``."""
        from sglang_coserve.guard.sampling import check_logit_processor

        check_logit_processor(recv_req)

    def mend_results(self, batch: Any, result: Any) -> None:
        """See ``sampling.end_unusable``."""
        from sglang_coserve.guard.sampling import end_unusable

        end_unusable(batch, result)
