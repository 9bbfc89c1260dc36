"""Starts SGLang's server with co-serving installed, or fails.

Flags are added to SGLang's argument parser, the scheduler is replaced through the
process functions that SGLang lets a launcher pass, and routes are added to its FastAPI
app. A scheduler that is not ours, or a route that is hidden by SGLang's, stops the start.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Any, Final

from fastapi import FastAPI

from sglang_coserve.batch.routes import BATCH_PREFIXES, missing_routes
from sglang_coserve.batch.routes.caller import batch_api_status
from sglang_coserve.batch.routes.view import PAGE_PATH, Keys
from sglang_coserve.config import CoserveConfig
from sglang_coserve.config.flags import refuse
from sglang_coserve.config.settings_file import one_setting, with_settings
from sglang_coserve.errors import CoserveError, StartupError
from sglang_coserve.guard.install import install_in_server
from sglang_coserve.guard.process_health import (
    expect_end_of_processes,
    freeze_imports,
    freeze_start_up_objects,
)
from sglang_coserve.http_lines.messages import LINES_PATH
from sglang_coserve.lines.background import TaskSupervisor
from sglang_coserve.logs import RequestIdMiddleware
from sglang_coserve.network import check_listen_address
from sglang_coserve.srt import compat
from sglang_coserve.srt.cpu import defaults as cpu
from sglang_coserve.srt.kv_checkpoint.settings import check_combination, server_settings
from sglang_coserve.srt.marks.marks_middleware import MarksMiddleware
from sglang_coserve.srt.marks.wanted_model import (
    WantedModelMiddleware,
    check_models_of_forms,
    set_model_names,
)
from sglang_coserve.srt.monitoring.otel_metrics import provider_if_configured
from sglang_coserve.srt.monitoring.scheduler_query import STATE_KEY, replicas_info
from sglang_coserve.srt.routes.drain import install_health
from sglang_coserve.srt.start_defaults import (
    StartDefaults,
    check_settings,
    model_path_in,
    start_defaults,
)

STATUS_PATH: Final = "/coserve/status"


class StartCheck:
    """Checks a server at the beginning of its app's lifespan.

    The schedulers are queried for their internal state, because the controller of several
    replicas does not pass on their start-up information.
    """

    def __init__(self, http_server: Any) -> None:
        """Install the check into the lifespan of SGLang's ``http_server`` module."""
        self.failure: CoserveError | None = None
        """The error that stopped the start; Uvicorn only logs it."""
        router = http_server.app.router
        inner = router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncGenerator[Any]:
            async with AsyncExitStack() as stack:
                try:
                    verify_app(app)
                    server = http_server._global_state
                    states = await server.tokenizer_manager.get_internal_state()
                    server.scheduler_info[STATE_KEY] = replicas_info(states)
                    entered = await stack.enter_async_context(inner(app))
                except CoserveError as error:
                    self.failure = error
                    raise
                yield entered

        router.lifespan_context = lifespan


def verify_app(app: FastAPI) -> None:
    """Check that no route of SGLang's comes before one of the Batch API's.

    Raises:
        StartupError: one does.
    """
    if problems := missing_routes(app):
        raise StartupError(
            "co-serving is not in place: another route answers at " + ", ".join(problems)
        )


logger = logging.getLogger(__name__)

_INTERRUPTED: Final = 130

_SWITCH_S = 0.0005
"""Python's thread switch interval, which bounds how long the event loop waits for a computing
thread. With Python's default of 5 ms it wakes 5.3 ms late in the median, with this one 0.7 ms."""


def launch_server(argv: Sequence[str]) -> None:
    """Serve until stopped; ``argv`` are the command-line flags without the program's name.

    Raises:
        UnsupportedError: SGLang has another version, or a setting cannot be co-served.
        ConfigError: a setting is wrong.
        InputFileError: the latency profile cannot be read.
        StartupError: a part of co-serving is not in place, the data directory of the
            Batch API or that of moved KV cannot be used, the port is taken, or a process of
            SGLang's did not start.
    """
    compat.check_version()
    # SGLang reads the environment when it is first imported, be it for its flags.
    defaults = start_defaults(model_path_in(argv) or one_setting("model_path", argv, "serve"))
    argv = with_settings(argv, _flag_names(), "serve")
    server_args = parse_server_args(argv, defaults)
    from sglang_coserve.srt.profiling.latency_source import check_profile
    from sglang_coserve.srt.routes.batch_api import check_batch_settings

    args = check_settings(server_args, on_cpu=defaults.on_cpu)
    check_profile(server_args._coserve, args.tp_size)
    check_batch_settings(server_args._coserve)
    provider_if_configured()  # Refuses what it cannot do.
    check_listen_address(server_args.host, server_args.port)
    from sglang_coserve.srt import processes

    with processes.logs_as(server_args._coserve.log_format, server_args.log_level):
        _launch(server_args, defaults)


def _launch(server_args: Any, defaults: StartDefaults) -> None:
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils import kill_process_tree

    from sglang_coserve.srt import processes

    is_ready = False

    def on_ready() -> None:
        nonlocal is_ready
        is_ready = True
        freeze_start_up_objects(http_server._global_state.tokenizer_manager)
        logger.info("to watch: http://%s:%s%s", server_args.host, server_args.port, PAGE_PATH)

    sys.setswitchinterval(_SWITCH_S)
    _install_routes(http_server, server_args, defaults)
    processes.watch_replicas()
    cores = cpu.cores_for(server_args) if defaults.on_cpu else nullcontext()
    try:
        with cores:
            http_server.launch_server(
                server_args,
                init_tokenizer_manager_func=processes.init_tokenizer_manager,
                run_scheduler_process_func=processes.run_scheduler_process,
                run_detokenizer_process_func=processes.run_detokenizer_process,
                launch_callback=on_ready,
            )
    except RuntimeError as error:
        if is_ready:
            raise
        # One of its processes has said why.
        has_said = f"exit code: {processes.REFUSED}" in str(error)
        reason = "the error above says why" if has_said else error
        raise StartupError(f"the server did not start: {reason}") from error
    finally:
        if (state := http_server._global_state) is not None:
            expect_end_of_processes(state.tokenizer_manager)
        kill_process_tree(os.getpid(), include_parent=False)
        # What is frozen would be reported as leaked.
        gc.unfreeze()


def parse_server_args(argv: Sequence[str], defaults: StartDefaults) -> Any:
    """Return SGLang's ``ServerArgs`` for ``argv``, with our settings attached.

    Raises:
        ConfigError: a flag is unknown, or has a value that we or SGLang refuse.
        StartupError: SGLang's parser did not accept our flags.
        SystemExit: argparse printed its help.
    """
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    with compat.refusals_of_sglang():
        load_plugins()
        with _our_flags(defaults):
            server_args = prepare_server_args(list(argv))
        if not isinstance(getattr(server_args, "_coserve", None), CoserveConfig):
            raise StartupError(
                "SGLang's argument parser did not take the coserve flags: it no longer calls "
                "ServerArgs.add_cli_args and from_cli_args"
            )
        compat.settings_of(server_args)  # It refuses more as it derives them.
    return server_args


def _flag_names() -> argparse.ArgumentParser:
    """Return a parser that knows all flags, and none of what the machine changes in them."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    CoserveConfig.add_cli_args(parser)
    return parser


@contextmanager
def _our_flags(defaults: StartDefaults) -> Iterator[None]:
    """Patch ``ServerArgs``: its parser has our flags, its result our settings."""
    from sglang.srt.server_args import ServerArgs

    replaced = {name: ServerArgs.__dict__[name] for name in ("add_cli_args", "from_cli_args")}
    add_cli_args, from_cli_args = ServerArgs.add_cli_args, ServerArgs.from_cli_args

    def add_with_ours(parser: argparse.ArgumentParser) -> None:
        add_cli_args(parser)
        CoserveConfig.add_cli_args(parser)
        parser.add_argument("--settings", metavar="FILE.toml", help="file of settings")
        parser.set_defaults(**defaults.flags)
        parser.prog = "coserve serve"
        parser.epilog = (
            "Example: coserve serve --model-path MODEL --slo-ttft-ms 300 --slo-tpot-ms 50"
        )
        parser.error = partial(refuse, parser)  # type: ignore[method-assign]

    def from_with_ours(args: argparse.Namespace) -> Any:
        config = CoserveConfig.from_mapping(vars(args))
        check_combination(vars(args), config)
        vars(args).update(server_settings(config, on_cpu=defaults.on_cpu))
        server_args = from_cli_args(args)
        # ServerArgs refuses unknown public attributes; this one travels to every process.
        server_args._coserve = config
        return server_args

    ServerArgs.add_cli_args = staticmethod(add_with_ours)
    ServerArgs.from_cli_args = staticmethod(from_with_ours)
    try:
        yield
    finally:
        for name, method in replaced.items():
            setattr(ServerArgs, name, method)


def _install_routes(http_server: Any, server_args: Any, defaults: StartDefaults) -> None:
    """Add our middleware and routes, and a check of them before the port is opened."""
    from sglang_coserve.srt.batch_backend.loaded_model import model_names
    from sglang_coserve.srt.monitoring.exporter import BackgroundFailures
    from sglang_coserve.srt.routes.batch_api import install_batch_api, open_routes_warning
    from sglang_coserve.srt.routes.engine_routes import View, install_load_route

    async def status() -> dict[str, Any]:
        """Return the state of each data-parallel replica and of the Batch API."""
        manager = http_server._global_state.tokenizer_manager
        states = await manager.get_internal_state()
        return {
            "replicas": [state["coserve"] for state in states],
            "batch_api": await batch_api_status(app),
            "background": background.state(),
            "emulated": defaults.emulated,
        }

    app = http_server.app
    config: CoserveConfig = server_args._coserve
    settings = compat.settings_of(server_args)
    counted = BackgroundFailures(settings.served_model_name) if settings.enable_metrics else None
    background = TaskSupervisor(count=counted)
    app.add_middleware(MarksMiddleware, offline_objectives=config.offline_objectives)
    check_models_of_forms(app)
    # The middleware added last runs first.
    app.add_middleware(WantedModelMiddleware)
    # Before our routes are there, which read little.
    install_in_server(http_server, free_prefixes=(*BATCH_PREFIXES, LINES_PATH))
    compat.mend_routes()
    install_health(http_server, background)
    app.add_middleware(RequestIdMiddleware)
    app.add_api_route(STATUS_PATH, status, methods=["GET"])
    install_load_route(http_server)
    install_batch_api(http_server, server_args.admin_api_key, background)
    keys = Keys(server_args.api_key, server_args.admin_api_key, is_open=config.open_view)
    View(http_server, keys, background).install(app)
    check = StartCheck(http_server)

    def verify_and_serve(
        server_args: Any, tokenizer_manager: Any, *args: Any, **kwargs: Any
    ) -> None:
        logger.info(compat.start_up_line())
        open_routes = open_routes_warning(server_args.api_key, server_args.admin_api_key)
        for warning in (defaults.warning, open_routes):
            if warning is not None:
                logger.warning(warning)
        set_model_names(app, partial(model_names, tokenizer_manager))
        # Again, because another process may have taken the port while the model was loaded.
        check_listen_address(server_args.host, server_args.port)
        freeze_imports()
        try:
            serve(server_args, tokenizer_manager, *args, **kwargs)
        finally:
            if check.failure is not None:
                raise check.failure

    serve = compat.replace(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server", verify_and_serve
    )


def main(argv: Sequence[str]) -> int:
    """Run ``launch_server`` and return the exit status; print an error as one line each."""
    from sglang_coserve.errors import CoserveError

    try:
        launch_server(argv)
    except CoserveError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0
