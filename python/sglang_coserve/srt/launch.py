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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from sglang_coserve.batch.routes.view import PAGE_PATH
from sglang_coserve.config import CoserveConfig
from sglang_coserve.config.config_file import Settings
from sglang_coserve.config.flags import refuse
from sglang_coserve.errors import StartupError
from sglang_coserve.network import check_listen_address
from sglang_coserve.srt import compat
from sglang_coserve.srt.monitoring.otel_metrics import provider_if_configured
from sglang_coserve.srt.monitoring.told_settings import told
from sglang_coserve.srt.optional_parts import KV_STORE, REQUEST_MOVES
from sglang_coserve.srt.platform import Platform
from sglang_coserve.srt.process_health import (
    expect_end_of_processes,
    freeze_start_up_objects,
)
from sglang_coserve.srt.start_defaults import (
    ANYWHERE,
    check_settings,
    model_path_in,
    set_up_platform,
)
from sglang_coserve.terminal import exit_status

logger = logging.getLogger(__name__)

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
    settings = Settings(argv)
    platform = set_up_platform(model_path_in(argv) or settings.one("model_path", "model"))
    server_args = parse_server_args(settings.command_line(_flag_names()), platform)
    from sglang_coserve.srt.profiling.latency_source import check_profile
    from sglang_coserve.srt.routes.batch_api import check_batch_settings

    args = check_settings(server_args, on_cpu=platform.on_cpu)
    check_profile(server_args._coserve, args.tp_size)
    check_batch_settings(server_args._coserve)
    provider_if_configured()  # Refuses what it cannot do.
    check_listen_address(server_args.host, server_args.port)
    from sglang_coserve.srt import processes

    with processes.logs_as(server_args._coserve.log_format, server_args.log_level):
        _launch(server_args, platform)


def _launch(server_args: Any, platform: Platform) -> None:
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils import kill_process_tree

    from sglang_coserve.srt import processes
    from sglang_coserve.srt.server_app import install_in_app

    is_ready = False

    def on_ready() -> None:
        nonlocal is_ready
        is_ready = True
        freeze_start_up_objects(http_server._global_state.tokenizer_manager)
        logger.info("to watch: http://%s:%s%s", server_args.host, server_args.port, PAGE_PATH)

    compat.log_settings_through(told)
    sys.setswitchinterval(_SWITCH_S)
    install_in_app(http_server, server_args, platform)
    processes.watch_replicas()
    try:
        with platform.cores_for(server_args):
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


def parse_server_args(argv: Sequence[str], platform: Platform) -> Any:
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
        with _our_flags(platform):
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
def _our_flags(platform: Platform) -> Iterator[None]:
    """Patch ``ServerArgs``: its parser has our flags, its result our settings."""
    from sglang.srt.server_args import ServerArgs

    replaced = {name: ServerArgs.__dict__[name] for name in ("add_cli_args", "from_cli_args")}
    add_cli_args, from_cli_args = ServerArgs.add_cli_args, ServerArgs.from_cli_args

    def add_with_ours(parser: argparse.ArgumentParser) -> None:
        add_cli_args(parser)
        CoserveConfig.add_cli_args(parser)
        parser.set_defaults(**ANYWHERE, **platform.flags)
        parser.prog = "coserve serve"
        parser.epilog = (
            "Example: coserve serve --model-path MODEL --slo-ttft-ms 300 --slo-tpot-ms 50"
        )
        parser.error = partial(refuse, parser)  # type: ignore[method-assign]

    def from_with_ours(args: argparse.Namespace) -> Any:
        config = CoserveConfig.from_mapping(vars(args))
        own = KV_STORE.server_settings(vars(args), config, on_cpu=platform.on_cpu)
        vars(args).update(own | REQUEST_MOVES.server_settings(config))
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


def main(argv: Sequence[str]) -> int:
    """Run ``launch_server`` and return the exit status; print an error as one line each."""
    return exit_status(partial(launch_server, argv))
