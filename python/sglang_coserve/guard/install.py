"""Installs what keeps one client's request from harming the others, in SGLang's processes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from sglang_coserve.guard.bodies import (
    RequestGateMiddleware,
    body_limits,
    install_body_errors,
    install_fail_fast,
    install_fail_fast_chats,
    install_paced_protocol,
)
from sglang_coserve.guard.chat_fields import trust_templates
from sglang_coserve.guard.stream_starts import begin_streams_first


def install_in_server(
    http_server: Any, *, free_prefixes: tuple[str, ...] = (), trusts_templates: bool = False
) -> None:
    """Install the guard in SGLang's module ``http_server``, for the routes that its app has by now.

    Args:
        http_server: The module.
        free_prefixes: See ``RequestGateMiddleware``.
        trusts_templates: Whether a request may bring a chat template.
    """
    from sglang_coserve.guard.output_parsers import install_parser_bounds
    from sglang_coserve.guard.threaded_handlers import replace_handlers

    app = http_server.app
    trust_templates(are_trusted=trusts_templates)
    install_paced_protocol()
    app.add_middleware(
        RequestGateMiddleware,
        limits=lambda: body_limits(http_server._global_state.tokenizer_manager),
        free_prefixes=free_prefixes,
    )
    install_fail_fast(app)
    install_fail_fast_chats()
    install_body_errors(app)
    stock_lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncGenerator[Any]:
        install_parser_bounds()
        async with stock_lifespan(app) as state:
            replace_handlers(app.state)
            begin_streams_first(app.state)
            yield state

    app.router.lifespan_context = lifespan


def install_in_scheduler(processors_of: Any) -> None:
    """Replace the parts of SGLang in this process through which one request can stall the others.

    To be called before the scheduler is created. ``processors_of`` is what ``GuardedSampler``
    finds a batch's custom logit processors with.
    """
    from sglang_coserve.guard.grammars import install_compiler_bound
    from sglang_coserve.guard.sampling import (
        install_eager_sampling,
        install_guarded_sampler,
        install_seeds,
    )
    from sglang_coserve.guard.stop_patterns import install_stop_patterns

    install_compiler_bound()
    install_eager_sampling()
    install_guarded_sampler(processors_of)
    install_seeds()
    install_stop_patterns()
