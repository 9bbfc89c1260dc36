"""Discovery: the addresses of the engines that there are now."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol
from urllib.parse import urlsplit

from sglang_coserve.errors import ConfigError, ServerError
from sglang_coserve.http_lines.http_engine import engine_address
from sglang_coserve.network import http_address

_LOOK_INTERVAL_S: Final = 5.0
"""Engines come and go by the minute: they load a model first."""

_GONE_S: Final = 60.0
"""Time for which resolvers must deny a name, and nothing else, before its engines are gone. A
resolver that has just started denies names that it does not know yet, for some seconds."""

_DENIED: Final = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
"""Errors by which a resolver says that the name, or an address of it, does not exist. Where no
resolver answers, the error is another one."""

_log = logging.getLogger(__name__)


class EngineSource(Protocol):
    """Somebody who knows of engines."""

    async def urls(self) -> Sequence[str]:
        """Return the engines that there are now.

        Raises:
            ServerError: it cannot be determined now.
        """


class EngineList(EngineSource):
    """Engines that the operator has named."""

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

    def __init__(self, url: str, gone_s: float = _GONE_S) -> None:
        """``url`` is ``http://NAME:PORT``.

        Args:
            url: The name and the port of the engines.
            gone_s: Time for which a name must be denied before it has no addresses.

        Raises:
            ConfigError: it is not.
        """
        self._gone_s = gone_s
        self._denied_since_s: float | None = None
        self._is_told_gone = False
        address = http_address(url, "--engine-dns")
        port = urlsplit(url).port  # Also the usual one, which httpx2 leaves out.
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
            if self._is_gone(error, loop.time()):
                if not self._is_told_gone:
                    _log.warning("%s is denied for %g s: its engines go", self._name, self._gone_s)
                self._is_told_gone = True
                return []
            raise ServerError(f"{self._name} cannot be resolved: {error}") from error
        self._denied_since_s, self._is_told_gone = None, False
        hosts = sorted({str(address[0]) for *_, address in found})
        return [
            f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"
            for host in hosts
        ]

    def _is_gone(self, error: Exception, now_s: float) -> bool:
        if not isinstance(error, socket.gaierror) or error.errno not in _DENIED:
            self._denied_since_s = None
            return False
        if self._denied_since_s is None:
            self._denied_since_s = now_s
        return now_s - self._denied_since_s >= self._gone_s


async def follow(
    sources: Sequence[EngineSource],
    set_engines: Callable[[Sequence[str]], None],
    interval_s: float = _LOOK_INTERVAL_S,
) -> None:
    """Call ``set_engines`` with the engines that all sources know, again and again; never without
    a source.

    Where a source fails, however it does, its last answer counts: otherwise an outage of the DNS
    would take all engines away. A name that the DNS denies for long has no engines: its addresses
    may be given to others, who would get prompts and the admin key.
    """
    if not sources:
        return
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
