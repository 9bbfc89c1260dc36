"""Addresses: calls to those that somebody else has named, and whether one can be listened on.

Whoever can have this server call an address could otherwise reach what only this server can: other
services of the machine, the cloud's metadata, an internal network.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import socket
import sys
from contextlib import suppress
from typing import Final

import httpx2

from sglang_coserve.errors import ConfigError, StartupError

_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
"""Leads to the IPv4 address in its last four bytes (RFC 6052)."""

_NEVER_PUBLIC: Final = (
    ipaddress.IPv6Network("::/96"),  # IPv4-compatible, 127.0.0.1 among them
    ipaddress.IPv6Network("64:ff9b:1::/48"),  # NAT64 for local use
    ipaddress.IPv6Network("2001::/32"),  # Teredo, a tunnel to any IPv4 address
    ipaddress.IPv6Network("2002::/16"),  # 6to4, another one
    ipaddress.IPv6Network("fec0::/10"),  # site-local
)
"""What ``is_global`` of ``ipaddress`` says too much of, in one version of Python or another."""

_MAX_ADDRESSES: Final = 4
"""Of one name: both versions of IP and a spare of each. Each may take the whole time to connect,
and whoever names the host says how many there are."""


def http_address(url: str, what: str, *, may_have_login: bool = False) -> httpx2.URL:
    """Return the address ``url``, which a setting or a user says is that of ``what``.

    Raises:
        ConfigError: it is none of HTTP, or has a user name or password that it may not have.
    """
    try:
        address = httpx2.URL(url)
        host = address.host
    except (httpx2.InvalidURL, ValueError) as error:
        raise ConfigError(f"{what} {url!r}: {error}") from error
    if address.scheme not in ("http", "https") or not host:
        raise ConfigError(f"{what} {url!r}: use http://HOST:PORT")
    if (address.port or 0) >= 1 << 16:
        raise ConfigError(f"{what} {url!r}: choose a port from 1 to 65535")
    if address.userinfo and not may_have_login:
        raise ConfigError(f"{what} must have neither a user name nor a password")
    return address


def check_key(what: str, key: str | None) -> None:
    """Check that an HTTP header can carry a key, if there is one.

    Raises:
        ConfigError: it cannot; the message has no part of the key.
    """
    if key and not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ConfigError(
            f"{what} has characters that no header can carry, such as a space or a line break at "
            "its end: leave them out"
        )


def is_public(address: str) -> bool:
    """Tell whether an IP address is one of the internet's, and of no tunnel into another network.

    Raises:
        ValueError: it is no address.
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return is_public(str(found.ipv4_mapped))
        if found in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)))
        if any(found in network for network in _NEVER_PUBLIC):
            return False
    return found.is_global and not found.is_multicast


class OutboundTransport(httpx2.AsyncBaseTransport):
    """Looks every name up itself and connects to the addresses that it has checked, one after
    the other, until one answers.

    A second look-up could answer another address. Redirects come this way, too. No
    proxy is used, and no connection again. A host without an address that it may have
    is an ``httpx2.ConnectError``.
    """

    def __init__(self) -> None:
        limits = httpx2.Limits(max_keepalive_connections=0)
        # The authorities of the environment count, and its proxies do not.
        verify = httpx2.create_ssl_context()
        self._inner = httpx2.AsyncHTTPTransport(verify=verify, trust_env=False, limits=limits)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """See ``httpx2.AsyncBaseTransport``."""
        host = request.url.raw_host.decode()
        failure: httpx2.TransportError = httpx2.ConnectError(f"{host} has no address")
        for address in await self._addresses(host):
            try:
                return await self._inner.handle_async_request(_pinned(request, host, address))
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                failure = error  # Nothing of the request has been sent: the next one may do.
        raise failure

    async def aclose(self) -> None:
        """Close what is open."""
        await self._inner.aclose()

    async def _addresses(self, host: str) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            entries = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpx2.ConnectError(f"{host} cannot be looked up: {error}") from error
        found = dict.fromkeys(str(entry[4][0]) for entry in entries)
        addresses = [address for address in found if is_public(address)]
        if not addresses:
            message = f"{host} has none but private addresses, which are not allowed"
            raise httpx2.ConnectError(message)
        return addresses[:_MAX_ADDRESSES]


def _pinned(request: httpx2.Request, host: str, address: str) -> httpx2.Request:
    """Return ``request`` as one to ``address``, which stays the one that was checked."""
    try:
        url = request.url.copy_with(host=address)
    except httpx2.InvalidURL as error:
        raise httpx2.ConnectError(f"{host} has the address {address}: {error}") from error
    return httpx2.Request(
        request.method,
        url,
        headers=request.headers,  # Its host is still the name.
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": host},
    )


def raised_open_files() -> int:
    """Raise the process's limit of open files as far as it may be raised; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # Some systems bound it in yet another way.
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def check_listen_address(host: str, port: int) -> None:
    """Check that ``host:port`` can be listened on now.

    SGLang notices only after the model is loaded, and does not exit then: its warm-up keeps
    sending requests to whichever process has the port.

    Raises:
        StartupError: the port is taken, or the host is not an address of this machine.
    """
    if port not in range(1 << 16):
        raise StartupError(f"cannot listen on port {port}: choose a --port from 1 to 65535")
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # As the server does: a version of IP that the kernel lacks is left out, unless it is all.
        for family, kind, protocol, _, address in [e for e in found if _is_known(e[0])] or found:
            with socket.socket(family, kind, protocol) as listener:
                # As the server does: connections in TIME_WAIT do not count.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind(address)
    except (OSError, UnicodeError) as error:
        raise StartupError(
            f"cannot listen on {host}, port {port}: {getattr(error, 'strerror', None) or error}: "
            "choose another --host or --port, or end what listens there"
        ) from error


def _is_known(family: int) -> bool:
    try:
        socket.socket(family, socket.SOCK_STREAM).close()
    except OSError:
        return False
    return True
