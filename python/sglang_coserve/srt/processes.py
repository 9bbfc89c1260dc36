"""Entry points of an engine's processes, with co-serving installed.

SGLang spawns its processes from functions that a launcher may replace. These
replacements are module-level functions, because spawned processes import
them by name.
"""

from __future__ import annotations

import json
import logging.config
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

from sglang_coserve.errors import ConfigError, CoserveError
from sglang_coserve.logs import json_formatter, log_settings
from sglang_coserve.srt import compat
from sglang_coserve.srt.process_health import freeze_imports
from sglang_coserve.terminal import tell

REFUSED: Final = 2
"""Exit code of a process that has said why it cannot serve."""

_FEWEST_KV_TOKENS: Final = 128
"""SGLang's first request of its own needs some of them."""


def run_scheduler_process(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler process with ``CoserveScheduler``; takes SGLang's arguments."""
    from sglang.srt.managers import scheduler as sglang_scheduler

    from sglang_coserve.srt.optional_parts import GUARD, KV_STORE, platform_for
    from sglang_coserve.srt.scheduler.scheduler import config_of

    platform = platform_for(None)
    platform.install_replacements()
    GUARD.install_in_scheduler(compat.logit_processors)
    KV_STORE.register(config_of(server_args), on_cpu=platform.on_cpu)
    compat.replace("sglang.srt.managers.scheduler.Scheduler", _make_scheduler)
    freeze_imports()
    sglang_scheduler.run_scheduler_process(server_args, *args, **kwargs)


def _make_scheduler(*args: Any, **kwargs: Any) -> Any:
    """Return a ``CoserveScheduler``; end the process with an error if it cannot serve the model.

    SGLang would log a traceback, and kill the server before it can say anything.
    """
    from sglang_coserve.srt.scheduler.scheduler import CoserveScheduler

    try:
        with compat.refusals_of_sglang():
            scheduler = CoserveScheduler(*args, **kwargs)
        if (kv_tokens := scheduler.max_total_num_tokens) < _FEWEST_KV_TOKENS:
            raise ConfigError(
                f"the KV memory holds {kv_tokens} tokens, too few to serve requests: raise "
                "--mem-fraction-static or --max-total-tokens, or take a smaller model"
            )
        return scheduler
    except CoserveError as error:
        tell(error)
        # Threads of SGLang's would keep an ordinary exit waiting.
        os._exit(REFUSED)


def watch_replicas() -> None:
    """Make the controller of several replicas exit when one of them does."""
    compat.replace(
        "sglang.srt.entrypoints.engine.run_data_parallel_controller_process",
        run_data_parallel_controller_process,
    )


def run_data_parallel_controller_process(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's data-parallel controller, and exit when a replica does.

    Takes SGLang's arguments. SGLang's controller would wait forever for a replica that was
    killed, and send it requests. When it exits instead, the server does, too.
    """
    from sglang.srt.managers import data_parallel_controller

    from sglang_coserve.srt.monitoring.online_load import count_offline_in_snapshots
    from sglang_coserve.srt.process_health import end_with_children

    end_with_children()
    count_offline_in_snapshots()
    freeze_imports()
    data_parallel_controller.run_data_parallel_controller_process(*args, **kwargs)


def run_detokenizer_process(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's detokenizer process; spawning it from here imports this package first."""
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process as run

    freeze_imports()
    run(*args, **kwargs)


def init_tokenizer_manager(server_args: Any, port_args: Any) -> tuple[Any, Any]:
    """Create SGLang's tokenizer manager, with additional checks of every request."""
    from sglang.srt.entrypoints import engine

    from sglang_coserve.srt.monitoring.online_load import read_our_snapshots
    from sglang_coserve.srt.tokenizer.tokenizer_manager import CoserveTokenizerManager

    read_our_snapshots()
    managers: tuple[Any, Any] = engine.init_tokenizer_manager(
        server_args, port_args, CoserveTokenizerManager
    )
    return managers


_LOGGING_VARIABLE: Final = "SGLANG_LOGGING_CONFIG_PATH"
"""Names a file that SGLang configures the log of each of its processes by."""


@contextmanager
def logs_as(log_format: str, level: str) -> Generator[None]:
    """Have what this process and those that it starts in this context log in ``log_format``.

    Raises:
        ConfigError: a file of SGLang's says already how they log.
    """
    if log_format == "text":  # SGLang's own.
        yield
        return
    if _LOGGING_VARIABLE in os.environ:
        raise ConfigError(
            f"--log-format {log_format}: {_LOGGING_VARIABLE} says how to log; unset it"
        )
    from uvicorn.config import LOGGING_CONFIG

    settings = log_settings(log_format, level)
    for formatter in LOGGING_CONFIG["formatters"].values():
        formatter["()"] = json_formatter
    LOGGING_CONFIG["filters"] = settings["filters"]
    for handler in LOGGING_CONFIG["handlers"].values():
        handler["filters"] = list(settings["filters"])
    logging.config.dictConfig(settings)
    with tempfile.NamedTemporaryFile("w", prefix="coserve-logging-", suffix=".json") as file:
        json.dump(settings, file)
        file.flush()
        os.environ[_LOGGING_VARIABLE] = file.name
        try:
            yield
        finally:
            del os.environ[_LOGGING_VARIABLE]
