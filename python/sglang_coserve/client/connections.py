"""The HTTP connections of a client, made for many answers that take long."""

from __future__ import annotations

import asyncio
import socket

import httpx

from sglang_coserve.errors import ConfigError

__all__ = ["Connections", "server_address"]

_CONNECT_TIMEOUT_S = 10.0
# Shorter than the 5 s after which uvicorn closes an idle connection, so that a
# request seldom meets a connection that is being closed.
_KEEPALIVE_S = 4.0


class Connections:
    """A fixed number of connections to one server.

    Each is an httpx client of its own: httpx's pool looks at every connection
    and every waiting request whenever one changes, which at 64 connections
    costs several times more than the request itself.

    A line may take hours, so only connecting has a timeout; TCP keep-alive finds
    out when the machine at the other end is gone. Proxy settings of the
    environment are not used.
    """

    def __init__(self, base_url: str, api_key: str | None, num_connections: int) -> None:
        """Prepare the connections; each is made when it is first needed.

        Raises:
            ConfigError: the address or the key cannot be used.
        """
        address, headers = server_address(base_url, api_key)
        headers["content-type"] = "application/json"
        ssl_context = httpx.create_ssl_context()
        self._clients = [
            httpx.AsyncClient(
                base_url=address,
                headers=headers,
                timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
                transport=httpx.AsyncHTTPTransport(
                    verify=ssl_context,
                    limits=httpx.Limits(max_connections=1, keepalive_expiry=_KEEPALIVE_S),
                    socket_options=_tcp_keepalive(),
                ),
            )
            for _ in range(num_connections)
        ]
        # Last in, first out: what was used last is the most likely to be still open.
        self._idle: asyncio.LifoQueue[httpx.AsyncClient] = asyncio.LifoQueue()
        for client in self._clients:
            self._idle.put_nowait(client)

    async def post(self, url: str, content: bytes, timeout_s: float | None) -> httpx.Response:
        """Send a JSON body over the next free connection and return the whole answer.

        Raises:
            TimeoutError: there is no answer ``timeout_s`` after it was sent.
            httpx.RequestError: the server cannot be reached, or the connection broke.
        """
        client = await self._idle.get()
        try:
            async with asyncio.timeout(timeout_s):
                return await client.post(url, content=content)
        finally:
            self._idle.put_nowait(client)

    async def close(self) -> None:
        """Close every connection."""
        for client in self._clients:
            await client.aclose()


def server_address(base_url: str, api_key: str | None) -> tuple[httpx.URL, dict[str, str]]:
    """Return where a server is, and the headers that every call to it has.

    Raises:
        ConfigError: the address or the key cannot be used.
    """
    address = _address(base_url)
    if api_key is None:
        return address, {}
    if not api_key.isascii() or not api_key.isprintable():
        raise ConfigError("the API key has characters that no HTTP header can carry")
    return address, {"authorization": f"Bearer {api_key}"}


def _address(base_url: str) -> httpx.URL:
    # With /v1 and without are both common; the urls of the lines begin with /v1.
    root = base_url.rstrip("/").removesuffix("/v1")
    try:
        address = httpx.URL(root)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{base_url!r} is no server address: {error}") from error
    if address.scheme not in ("http", "https") or not address.host:
        raise ConfigError(f"{base_url!r} is no server address: use http://HOST:PORT")
    return address


def _tcp_keepalive() -> list[tuple[int, int, int]]:
    """Close a connection to a silent peer after two minutes, where the system supports it."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options
