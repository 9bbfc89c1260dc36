"""The engines that there are, as they were when they were last asked, and how they delay users."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import ssl
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, Protocol
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError

from sglang_coserve.config.coserve import Pool
from sglang_coserve.errors import ConfigError, ServerError
from sglang_coserve.fleet.line_placement.engines import LINES_AHEAD, FailureStreak, line_window
from sglang_coserve.http_lines.engine_connection import EngineConnection, engine_address
from sglang_coserve.http_lines.engine_load import LinesLoad
from sglang_coserve.http_lines.messages import (
    LOAD_PATH,
    EngineDelays,
    EngineDescription,
    EngineLostError,
    EngineRefusesError,
)
from sglang_coserve.json_documents import explain
from sglang_coserve.lines.backend import TokenRate
from sglang_coserve.network import check_key, http_address


class FleetDelays:
    """Sums since this gateway began. Pure.

    An engine counts from its own start, and outlives gateways: what it says first has been counted
    by the gateway before. One that was started again counts from 0.
    """

    def __init__(self) -> None:
        self._latest: dict[str, EngineDelays] = {}
        self._sums_s: dict[str, float] = {}

    def add(self, engine: str, delays: EngineDelays) -> None:
        """Take what an engine, by its address, says now."""
        before = self._latest.get(engine, delays)
        counted_s = before.online_delays_s or {}
        if before.run != delays.run:
            counted_s = {}
        for batch_id, seconds in (delays.online_delays_s or {}).items():
            added_s = seconds - counted_s.get(batch_id, 0.0)
            self._sums_s[batch_id] = self._sums_s.get(batch_id, 0.0) + added_s
        self._latest[engine] = delays

    def keep(self, engines: Collection[str]) -> None:
        """Forget all other engines, and batches of which none that is left says anything."""
        self._latest = {name: delays for name, delays in self._latest.items() if name in engines}
        named = {
            batch_id
            for delays in self._latest.values()
            for batch_id in delays.online_delays_s or ()
        }
        self._sums_s = {name: sum_s for name, sum_s in self._sums_s.items() if name in named}

    def sums_s(self) -> Mapping[str, float] | None:
        """Return the seconds by batch; None while no engine knows."""
        is_known = any(delays.online_delays_s is not None for delays in self._latest.values())
        return dict(self._sums_s) if is_known else None


_RATE_WINDOW_S: Final = 10.0
"""Online traffic changes the rate of an engine, and the sum changes at once when an engine comes or
goes. Long against the time between two ends of lines."""


class EngineState(Enum):
    """Whether an engine takes lines, and if not, why."""

    UP = "up"
    DOWN = "down"
    """It does not answer."""

    DRAINING = "draining"
    """It answers, and takes no lines now."""

    FAILING = "failing"
    """It answers, and has failed on several lines in a row: it rests."""

    REFUSING = "refusing"
    """It answers, but not as an engine of ours: a wrong key, or another program."""


class RemoteEngine:
    """An engine and what is known of it."""

    def __init__(
        self,
        connection: EngineConnection,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.connection = connection
        self._monotonic_s = monotonic_s
        self.state = EngineState.DOWN
        self.reason: str | None = "it was not asked yet"
        """Why it takes no lines; None while it does."""

        self.description: EngineDescription | None = None
        """What it serves, as far as it was ever known."""

        self.load: LinesLoad | None = None
        self.window = LINES_AHEAD
        """Lines that it is to have at a time, while it takes any."""

        self.rate = TokenRate(monotonic_s, _RATE_WINDOW_S)
        self.streak = FailureStreak()
        self.lines_served = 0
        self.lines_lost = 0
        """Attempts that ended with the connection."""

    @property
    def url(self) -> str:
        """Where it is, which is also its name."""
        return self.connection.url

    @property
    def pool(self) -> Pool | None:
        """Which pool it is of, as far as it was ever known."""
        return self.load.pool if self.load is not None else None

    def set_state(self, state: EngineState, reason: str | None) -> None:
        """Note whether it takes lines; ``look`` finds out when that changes back."""
        self.state, self.reason = state, reason

    @property
    def model(self) -> str | None:
        """What it serves; None while it takes no lines."""
        is_up = self.state is EngineState.UP
        return self.description.model if is_up and self.description else None

    @property
    def model_names(self) -> tuple[str, ...]:
        """What requests may ask it for, the model first; empty as long as it has not said."""
        load = self.load
        if load is None:
            return ()
        return load.models or ((load.model_name,) if load.model_name else ())

    async def look(self, in_flight: int) -> None:
        """Ask how it is, and note that; it has ``in_flight`` lines from us."""
        try:
            load = _load(await self.connection.ask(LOAD_PATH), self.url)
            is_known = self.load is not None and load.model == self.load.model
            if self.state is not EngineState.UP or not is_known:
                await self._describe()
        except EngineLostError as error:
            self.set_state(EngineState.DOWN, str(error))
        except EngineRefusesError as error:
            self.set_state(EngineState.REFUSING, str(error))
        else:
            assert self.description is not None
            self.load = load
            self.window = line_window(in_flight, load.offline.waiting)
            if self.streak.is_resting(self._monotonic_s()):
                self.set_state(EngineState.FAILING, self.reason)
            elif load.is_draining:
                self.set_state(EngineState.DRAINING, "it drains")
            elif self.description.refuses is not None:
                self.set_state(EngineState.DRAINING, self.description.refuses)
            else:
                self.set_state(EngineState.UP, None)

    async def _describe(self) -> None:
        is_first = self.description is None
        self.description = await self.connection.describe()
        if is_first:
            expected_per_s = self.description.expected_tokens_per_s
            self.rate = TokenRate(self._monotonic_s, _RATE_WINDOW_S, expected_per_s)


def _load(content: bytes, url: str) -> LinesLoad:
    try:
        return LinesLoad.model_validate_json(content)
    except ValidationError as error:
        raise EngineRefusesError(f"{url}{LOAD_PATH}: {explain(error)}") from None


_LOOK_INTERVAL_S: Final = 5.0
"""Engines come and go by the minute: they load a model first."""

_TIMEOUT_S: Final = 10.0

_log = logging.getLogger(__name__)


class EngineSource(Protocol):
    """Somebody who knows of engines."""

    async def urls(self) -> Sequence[str]:
        """Return the engines that there are now.

        Raises:
            ServerError: it cannot be determined now.
        """


class EngineList(EngineSource):
    """Those that were named."""

    def __init__(self, urls: Iterable[str]) -> None:
        """Each is ``http://HOST:PORT``.

        Raises:
            ConfigError: one is not, or there are none.
        """
        self._urls = [engine_address(url) for url in urls]
        if not self._urls:
            raise ConfigError("no engines: name one at least")

    async def urls(self) -> Sequence[str]:
        """See ``EngineSource``."""
        return self._urls


class DnsName(EngineSource):
    """All addresses of a name, as of a headless service of Kubernetes."""

    def __init__(self, url: str) -> None:
        """``url`` is ``http://NAME:PORT``.

        Raises:
            ConfigError: it is not.
        """
        address = http_address(url, "--engine-dns")
        port = urlsplit(url).port  # Also the usual one, which httpx leaves out.
        if address.scheme != "http" or port is None or address.raw_path != b"/":
            # A certificate is for the name, and each engine is called by its address.
            raise ConfigError(f"--engine-dns {url!r}: use http://NAME:PORT")
        self._name, self._port = address.host, port

    async def urls(self) -> Sequence[str]:
        """See ``EngineSource``."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ServerError(f"{self._name} cannot be resolved: {error}") from error
        hosts = sorted({str(address[0]) for *_, address in found})
        return [
            f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"
            for host in hosts
        ]


class Router(EngineSource):
    """The workers of SGLang's router (``smg``, ``sglang-router``)."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """``api_key`` is the router's.

        Raises:
            ConfigError: the address or the key cannot be used.
        """
        address = http_address(url, "--engine-router", may_have_login=True)
        self._url = f"{str(address).rstrip('/')}/workers"
        check_key("the router's API key", api_key)
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._authorities: ssl.SSLContext | None = None
        """Of the environment; its proxies do not count."""

    async def urls(self) -> Sequence[str]:
        """See ``EngineSource``; whether an address can be used is for who uses it."""
        try:
            if self._authorities is None:
                # Reading them takes tens of milliseconds, in which no token would pass.
                self._authorities = await asyncio.to_thread(httpx.create_ssl_context)
            async with httpx.AsyncClient(
                headers=self._headers,
                timeout=_TIMEOUT_S,
                verify=self._authorities,
                trust_env=False,
            ) as client:
                answer = (await client.get(self._url)).raise_for_status()
            workers = json.loads(answer.content)["workers"]
            urls = [worker["url"] for worker in workers if isinstance(worker.get("url"), str)]
            if workers and not urls:
                raise ValueError("none of them has a url")
            # With --dp-aware a worker is one rank of an engine: http://HOST:PORT@RANK.
            return [re.sub(r"@\d+$", "", url).rstrip("/") for url in urls]
        except httpx.HTTPError as error:
            raise ServerError(f"{self._url}: {error or type(error).__name__}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ServerError(f"{self._url} does not list workers: {error!r}") from error


async def follow(
    sources: Sequence[EngineSource],
    set_engines: Callable[[Sequence[str]], None],
    interval_s: float = _LOOK_INTERVAL_S,
) -> None:
    """Call ``set_engines`` with the engines that all sources know, again and again.

    Where a source fails, however it does, its last answer counts: otherwise an outage of the DNS
    would take all engines away.
    """
    known: list[Sequence[str]] = [[] for _ in sources]
    failures: list[str | None] = [None for _ in sources]
    while True:
        for number, source in enumerate(sources):
            try:
                known[number], failure = await source.urls(), None
            except ServerError as error:
                failure = str(error)
            except Exception as error:
                failure = f"{type(source).__name__} failed: {error!r}"
            if failure is not None and failure != failures[number]:
                _log.warning("%s; the engines known so far stay", failure)
            failures[number] = failure
        set_engines([url for urls in known for url in urls])
        await asyncio.sleep(interval_s)
