"""Which addresses are public, and that no others are connected to."""

from __future__ import annotations

import asyncio
import ipaddress

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@given(st.integers(0, 2**32 - 1))
def test_an_ipv4_address_is_as_public_inside_an_ipv6_one(number: int) -> None:
    v4 = ipaddress.IPv4Address(number)
    for embedded in (f"::ffff:{v4}", f"64:ff9b::{v4}"):
        assert is_public(embedded) == is_public(str(v4))
    assert not is_public(f"::{v4}")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "0x7f.1", "2130706433", "[::ffff:127.0.0.1]"]
)
async def test_nothing_private_is_connected_to(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
        writer.close()

    async def get(port: int) -> str:
        async with httpx.AsyncClient(transport=OutboundTransport(), timeout=10) as client:
            return (await client.get(f"http://{host}:{port}/x")).text

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(httpx.ConnectError, match="private"):
            await get(port)
        assert calls == []
        if "::" not in host:
            monkeypatch.setattr("sglang_coserve.network.is_public", lambda _: True)
            assert await get(port) == "hi"
            assert f"host: {host}:{port}".encode() in calls[0].lower()


@pytest.mark.parametrize("is_public", [True, False])
async def test_the_next_address_is_tried_if_it_is_allowed(
    monkeypatch: pytest.MonkeyPatch, is_public: bool
) -> None:
    calls: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
        writer.close()

    async def look_up(*_: object, **__: object) -> list[tuple[object, ...]]:
        # The first cannot be connected to; the second is listened on.
        return [(0, 0, 0, "", (address, 0)) for address in ("127.0.0.2", "127.0.0.1")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    monkeypatch.setattr("sglang_coserve.network.is_public", lambda _: is_public)
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://two.example:{server.sockets[0].getsockname()[1]}/x"
        async with httpx.AsyncClient(transport=OutboundTransport(), timeout=10) as client:
            if is_public:
                assert (await client.post(url, content=b"once")).text == "hi"
                assert len(calls) == 1
            else:
                with pytest.raises(httpx.ConnectError, match="private"):
                    await client.post(url, content=b"once")
                assert calls == []


@pytest.mark.parametrize("host", ["a" * 64 + ".org", "no-such-name.invalid"])
async def test_a_name_that_leads_nowhere(host: str) -> None:
    async def get() -> None:
        async with httpx.AsyncClient(transport=OutboundTransport(), timeout=10) as client:
            await client.get(f"http://{host}/")

    with pytest.raises(httpx.ConnectError, match="looked up"):
        await get()
