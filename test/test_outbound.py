"""Which addresses are public, and that no others are connected to."""

from __future__ import annotations

import asyncio
import ipaddress
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from certificates import own_authority
from sglang_coserve.network import OutboundTransport, is_public

PRIVATE_V4 = ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"]
PRIVATE = [
    *PRIVATE_V4,
    *("100.64.0.1", "198.18.0.1", "224.0.0.1", "255.255.255.255", "240.0.0.1"),
    *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1"),
    *("fec0::1", "feff::1"),
    *(f"::ffff:{v4}" for v4 in PRIVATE_V4),
    *(f"::{v4}" for v4 in PRIVATE_V4),
    *(f"64:ff9b::{v4}" for v4 in PRIVATE_V4),
    *("64:ff9b:1::8.8.8.8", "::8.8.8.8"),
    *("2002:7f00:1::", "2002:a01:203::1", "2002:808:808::1", "2001:0:4136:e378::1"),
]
PUBLIC = ["8.8.8.8", "93.184.215.14", "2606:4700::1111", "64:ff9b::8.8.8.8", "::ffff:8.8.8.8"]


@pytest.mark.parametrize("address", [*PRIVATE, *PUBLIC])
def test_which_addresses_are_public(address: str) -> None:
    assert is_public(address) == (address in PUBLIC)


@given(st.integers(0, 2**32 - 1))
def test_an_ipv4_address_is_as_public_inside_an_ipv6_one(number: int) -> None:
    v4 = ipaddress.IPv4Address(number)
    for embedded in (f"::ffff:{v4}", f"64:ff9b::{v4}"):
        assert is_public(embedded) == is_public(str(v4))
    assert not is_public(f"::{v4}")


class Web:
    """A web server on the loopback, and what was asked of it."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.calls.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
        writer.close()


async def post(host: str, port: int, scheme: str = "http") -> str:
    async with httpx.AsyncClient(transport=OutboundTransport(), timeout=10) as client:
        return (await client.post(f"{scheme}://{host}:{port}/x", content=b"once")).text


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "0x7f.1", "2130706433", "[::ffff:127.0.0.1]"]
)
async def test_nothing_private_is_connected_to(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    web = Web()
    async with await asyncio.start_server(web, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(httpx.ConnectError, match="private"):
            await post(host, port)
        assert web.calls == []
        if "::" not in host:
            monkeypatch.setattr("sglang_coserve.network.is_public", lambda _: True)
            assert await post(host, port) == "hi"
            assert f"host: {host}:{port}".encode() in web.calls[0].lower()


async def test_authorities_of_the_environment_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = own_authority(tmp_path, monkeypatch)
    monkeypatch.setattr("sglang_coserve.network.is_public", lambda _: True)
    async with await asyncio.start_server(Web(), "127.0.0.1", 0, ssl=context) as server:
        assert await post("127.0.0.1", server.sockets[0].getsockname()[1], "https") == "hi"


@pytest.mark.parametrize("is_public", [True, False])
async def test_the_next_address_is_tried_if_it_is_allowed(
    monkeypatch: pytest.MonkeyPatch, is_public: bool
) -> None:
    web = Web()

    async def look_up(*_: object, **__: object) -> list[tuple[object, ...]]:
        # The first cannot be connected to; the second is listened on.
        return [(0, 0, 0, "", (address, 0)) for address in ("127.0.0.2", "127.0.0.1")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    monkeypatch.setattr("sglang_coserve.network.is_public", lambda _: is_public)
    async with await asyncio.start_server(web, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        if is_public:
            assert await post("two.example", port) == "hi"
        else:
            with pytest.raises(httpx.ConnectError, match="private"):
                await post("two.example", port)
        assert len(web.calls) == is_public


@pytest.mark.parametrize("host", ["a" * 64 + ".org", "no-such-name.invalid"])
async def test_a_name_that_leads_nowhere(host: str) -> None:
    with pytest.raises(httpx.ConnectError, match="looked up"):
        await post(host, 80)
