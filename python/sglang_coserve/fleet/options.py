"""The command line of ``coserve gateway``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from sglang_coserve.config import BatchApiConfig
from sglang_coserve.config.config_file import Settings
from sglang_coserve.config.flags import FlagParser, add_flags, setting
from sglang_coserve.errors import ConfigError
from sglang_coserve.fleet.discovery import DnsName, EngineList, EngineSource
from sglang_coserve.fleet.routed_engines import KEY_VARIABLE, RoutedEngines
from sglang_coserve.logs import LOG_FORMATS
from sglang_coserve.network import check_key, http_address

ENGINE_KEY_VARIABLE: Final = "COSERVE_ENGINE_ADMIN_KEY"

_MAX_IN_FLIGHT: Final = 65_536
"""What the engines' windows add up to decides; this only bounds the tasks of a large fleet. What
lines take of memory is bounded by their bytes."""


def engine_key_of(given: str | None, how: str) -> str:
    """Return the admin key of all engines, from the environment where it is not ``given``; ``how``
    says to do so.

    Raises:
        ConfigError: there is none, or one that cannot be sent.
    """
    key = given or os.environ.get(ENGINE_KEY_VARIABLE)
    if not key:
        raise ConfigError(
            "engines serve lines for their admin key only: start them with --admin-api-key KEY,"
            f" and set {ENGINE_KEY_VARIABLE} to it, or {how}"
        )
    check_key("the engines' admin key", key)
    return key


@dataclass(frozen=True, slots=True)
class GatewayOptions(BatchApiConfig):
    """The settings of a gateway; every field is a flag.

    Raises:
        ConfigError: one cannot be used, or is missing.
    """

    host: str = setting("127.0.0.1", "where to listen; default: this machine alone")
    port: int = setting(30000, "where to listen", type=int)
    engine: Sequence[str] = setting(
        (), "an engine, http://HOST:PORT; once for each", action="append", metavar="URL"
    )
    engine_dns: Sequence[str] = setting(
        (),
        "engines at all addresses of a name, looked up every 5 s",
        action="append",
        metavar="http://NAME:PORT",
    )
    router: str | None = setting(
        None,
        "a router (smg, sglang-router, llm-d's gateway) that places the lines itself; its API key "
        f" is in the environment variable {KEY_VARIABLE}",
        metavar="URL",
    )
    router_max_lines: int = setting(
        64, "lines that the router has at a time", type=int, metavar="LINES"
    )
    engine_admin_key: str | None = setting(
        None,
        "the --admin-api-key of all engines; better in the environment variable "
        f"{ENGINE_KEY_VARIABLE}, which other users of the machine cannot see",
        metavar="KEY",
    )
    api_key: str | None = setting(
        None, "what clients must bring; by default everybody may call", metavar="KEY"
    )
    admin_api_key: str | None = setting(
        None, "opens the operator's routes, /coserve/batches", metavar="KEY"
    )
    log_level: str = setting(
        "info", "the least that is logged", choices=("debug", "info", "warning", "error")
    )
    log_format: str = setting(
        LOG_FORMATS[0], "json: each record as one line of JSON", choices=LOG_FORMATS
    )

    def __post_init__(self) -> None:
        if self.router is None and not self.sources:
            raise ConfigError("no engines: add --engine URL, --engine-dns or --router")
        if self.router is not None and self.sources:
            raise ConfigError("--router places lines itself: leave --engine and --engine-dns out")
        if self.router_max_lines < 1:
            raise ConfigError(f"--router-max-lines {self.router_max_lines}: use 1 or more")
        if self.coserve_data_dir is None:
            raise ConfigError("nowhere to keep batches: add --coserve-data-dir DIRECTORY")
        BatchApiConfig.__post_init__(self)
        check_key("--api-key", self.api_key)
        check_key("--admin-api-key", self.admin_api_key)
        if self.router is None:
            _ = self.engine_key  # Raises where there is none.
        else:
            http_address(self.router, "--router")
            check_key(KEY_VARIABLE, os.environ.get(KEY_VARIABLE))

    @property
    def data(self) -> Path:
        """The directory of the Batch API."""
        return Path(self.coserve_data_dir or "")

    @property
    def engine_key(self) -> str:
        """The admin key of all engines, given or from the environment."""
        return engine_key_of(self.engine_admin_key, "add --engine-admin-key KEY")

    def make_router(self) -> RoutedEngines:
        """Return the router of ``--router``."""
        key = os.environ.get(KEY_VARIABLE)
        return RoutedEngines(self.router or "", key, self.router_max_lines)

    @property
    def sources(self) -> list[EngineSource]:
        """Who knows of engines."""
        named: list[EngineSource] = [EngineList(self.engine)] if self.engine else []
        return [*named, *map(DnsName, self.engine_dns)]


def parse_options(argv: Sequence[str]) -> GatewayOptions:
    """Read the command line, a file of settings and the environment.

    Raises:
        ConfigError: a flag is unknown, has a value that cannot be used, or is missing.
        SystemExit: argparse printed its help.
    """
    parser = _parser()
    args = parser.parse_args(Settings(argv).command_line(parser))
    return GatewayOptions.from_mapping(vars(args))


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        prog="coserve gateway",
        description="One Batch API in front of many engines.",
        epilog="Example: coserve gateway --engine http://gpu-1:30001 --coserve-data-dir batches",
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="file of settings; flags win over it")
    shared = BatchApiConfig.__dataclass_fields__
    add_flags(parser, (field for field in fields(GatewayOptions) if field.name not in shared))
    BatchApiConfig.add_cli_args(parser)
    parser.set_defaults(batch_max_in_flight=_MAX_IN_FLIGHT)
    return parser
