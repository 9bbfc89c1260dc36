"""The command line of ``coserve gateway``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sglang_coserve.config import BatchApiConfig
from sglang_coserve.config.flags import FlagParser
from sglang_coserve.config.settings_file import with_settings
from sglang_coserve.errors import ConfigError
from sglang_coserve.fleet.engine import DnsName, EngineList, EngineSource, Router
from sglang_coserve.logs import LOG_FORMATS
from sglang_coserve.network import http_address

ENGINE_KEY_VARIABLE: Final = "COSERVE_ENGINE_ADMIN_KEY"
_ROUTER_KEY_VARIABLE: Final = "COSERVE_ROUTER_API_KEY"

_MAX_IN_FLIGHT: Final = 65_536
"""What the engines' windows add up to decides; this only bounds the tasks of a large fleet. What
lines take of memory is bounded by their bytes."""


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The settings of a gateway."""

    host: str
    port: int
    data: Path
    batch_api: BatchApiConfig
    sources: tuple[EngineSource, ...]
    router: str | None
    """Where online requests go on to."""

    push_prompts: bool
    """Whether relaxed engines compute the prompts of online requests."""

    known_router: str | None
    """The router that clients of online requests are told of."""

    engine_admin_key: str
    api_key: str | None
    admin_api_key: str | None
    log_level: str
    log_format: str


def parse_options(argv: Sequence[str]) -> GatewayOptions:
    """Read the command line, a file of settings and the environment.

    Raises:
        ConfigError: a flag is unknown, has a value that cannot be used, or is missing.
        SystemExit: argparse printed its help.
    """
    parser = _parser()
    args = parser.parse_args(with_settings(argv, parser, "gateway"))
    sources: list[EngineSource] = []
    if args.engine:
        sources.append(EngineList(args.engine))
    sources += map(DnsName, args.engine_dns)
    router_key = os.environ.get(_ROUTER_KEY_VARIABLE)
    sources += (Router(url, router_key) for url in args.engine_router)
    if not sources:
        raise ConfigError("no engines: add --engine URL, --engine-dns or --engine-router")
    if args.coserve_data_dir is None:
        raise ConfigError("nowhere to keep batches: add --coserve-data-dir DIRECTORY")
    if args.push_prompts and not args.router:
        raise ConfigError("--push-prompts is for online requests that go on: add --router URL")
    engine_key = args.engine_admin_key or os.environ.get(ENGINE_KEY_VARIABLE)
    if not engine_key:
        raise ConfigError(
            "engines serve lines for their admin key only: start them with --admin-api-key KEY,"
            f" and set {ENGINE_KEY_VARIABLE} to it, or add --engine-admin-key KEY"
        )
    return GatewayOptions(
        host=args.host,
        port=args.port,
        data=Path(args.coserve_data_dir),
        batch_api=BatchApiConfig.from_mapping(vars(args)),
        sources=tuple(sources),
        router=str(http_address(args.router, "--router")) if args.router else None,
        push_prompts=args.push_prompts,
        known_router=next(iter(args.engine_router), None),
        engine_admin_key=engine_key,
        api_key=args.api_key,
        admin_api_key=args.admin_api_key,
        log_level=args.log_level,
        log_format=args.log_format,
    )


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        prog="coserve gateway",
        description="One Batch API in front of many engines.",
        epilog="Example: coserve gateway --engine http://gpu-1:30001 --coserve-data-dir batches",
    )
    add = parser.add_argument
    add("--settings", metavar="FILE.toml", help="file of settings; flags win over it")
    add("--host", default="127.0.0.1", help="where to listen; default: this machine alone")
    add("--port", type=int, default=30000, help="where to listen; default: %(default)s")
    add(
        "--engine",
        action="append",
        default=[],
        metavar="URL",
        help="an engine, http://HOST:PORT; once for each",
    )
    add(
        "--engine-dns",
        action="append",
        default=[],
        metavar="http://NAME:PORT",
        help="engines at all addresses of a name, looked up every 5 s",
    )
    add(
        "--engine-router",
        action="append",
        default=[],
        metavar="URL",
        help="the workers of SGLang's router, asked for every 5 s; its API key is in the"
        f" environment variable {_ROUTER_KEY_VARIABLE}",
    )
    add(
        "--router",
        metavar="URL",
        help="where online requests go on to, unchanged, so that clients need one address; by"
        " default they are told to go to the router themselves",
    )
    add(
        "--push-prompts",
        action="store_true",
        help="let relaxed engines compute the prompts of these requests, and leave their KV for the"
        " strict ones behind the router (docs/fleet.md, pools)",
    )
    add(
        "--engine-admin-key",
        metavar="KEY",
        help="the --admin-api-key of all engines; better in the environment variable"
        f" {ENGINE_KEY_VARIABLE}, which other users of the machine cannot see",
    )
    add("--api-key", metavar="KEY", help="what clients must bring; by default everybody may call")
    add("--admin-api-key", metavar="KEY", help="opens the operator's routes, /coserve/batches")
    add(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="the least that is logged; default: %(default)s",
    )
    add("--log-format", default=LOG_FORMATS[0], choices=LOG_FORMATS, help="default: %(default)s")
    BatchApiConfig.add_cli_args(parser)
    parser.set_defaults(batch_max_in_flight=_MAX_IN_FLIGHT)
    return parser
