"""``python -m sglang_coserve.fleet``, the same as ``coserve gateway``: runs until it is stopped."""

from __future__ import annotations

import asyncio
import logging
import logging.config
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import uvicorn

from sglang_coserve.batch.api import event_delivery
from sglang_coserve.batch.data_directory import InUseError
from sglang_coserve.batch.service import BatchService
from sglang_coserve.errors import CoserveError
from sglang_coserve.fleet.gateway import gateway_app
from sglang_coserve.fleet.options import GatewayOptions, parse_options
from sglang_coserve.logs import log_settings
from sglang_coserve.network import check_listen_address
from sglang_coserve.terminal import exit_status
from sglang_coserve.web.asgi import IDLE_CONNECTION_S

_GRACE_S: Final = 5
"""For calls under way when the gateway is stopped; batches are kept in any case."""

_log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Run the command line; return its exit status, errors printed in one line each."""
    return exit_status(lambda: serve_gateway(parse_options(argv)))


def serve_gateway(options: GatewayOptions) -> None:
    """Serve until SIGINT or SIGTERM; what is unfinished goes on at the next start.

    Raises:
        StartupError: the port is taken, or the data directory cannot be used.
        ConfigError: a setting cannot be used.
        KeyboardInterrupt: it was stopped by Ctrl-C.
    """
    logging.config.dictConfig(log_settings(options.log_format, options.log_level))
    check_listen_address(options.host, options.port)
    event_delivery(options)  # Raises if the settings cannot be used.
    # One that is in use becomes free, perhaps: this is a standby then.
    with suppress(InUseError):
        asyncio.run(BatchService.check(options.data))
    if not options.api_key:
        _log.warning(
            "without --api-key everybody who reaches %s, port %d, may call, and each key is an"
            " owner, checked by nobody here: add it, or let a proxy check keys",
            options.host,
            options.port,
        )
    failures: list[CoserveError] = []

    def fail(error: CoserveError) -> None:
        failures.append(error)
        server.should_exit = True

    config = uvicorn.Config(
        gateway_app(options, fail),
        host=options.host,
        port=options.port,
        log_config=None,
        log_level="warning",
        timeout_graceful_shutdown=_GRACE_S,
        timeout_keep_alive=IDLE_CONNECTION_S,
    )
    server = uvicorn.Server(config)
    server.run()
    if failures:
        raise failures[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
