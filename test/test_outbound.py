"""Which addresses are public, and that no others are connected to."""

from __future__ import annotations

import asyncio
import ipaddress
from pathlib import Path

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from certificates import own_authority
from sglang_coserve.network import OutboundTransport, is_public
from web_server import Call, web_server

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


def say_hi(call: Call) -> None:
    call.answer(body=b"hi")


async def post(url: str) -> str:
    async with httpx2.AsyncClient(transport=OutboundTransport(), timeout=10) as client:
        return (await client.post(f"{url}/x", content=b"once")).text


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "0x7f.1", "2130706433", "[::ffff:127.0.0.1]"]
)
async def test_nothing_private_is_connected_to(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with web_server(say_hi) as web:
        url = web.url.replace("127.0.0.1", host)
        with pytest.raises(httpx2.ConnectError, match="private"):
            await post(url)
        assert web.calls == []
        if "::" not in host:
            monkeypatch.setattr("sglang_coserve.network.is_public", lambda _: True)
            assert await post(url) == "hi"
            assert f"http://{web.calls[0].headers['host']}" == url


async def test_authorities_of_the_environment_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = own_authority(tmp_path, monkeypatch)
    monkeypatch.setattr("sglang_coserve.network.is_public", lambda _: True)
    with web_server(say_hi, context) as web:
        assert await post(web.url) == "hi"


@pytest.mark.parametrize("is_public", [True, False])
async def test_the_next_address_is_tried_if_it_is_allowed(
    monkeypatch: pytest.MonkeyPatch, is_public: bool
) -> None:

    async def look_up(*_: object, **__: object) -> list[tuple[object, ...]]:
        # The first cannot be connected to; the second is listened on.
        return [(0, 0, 0, "", (address, 0)) for address in ("127.0.0.2", "127.0.0.1")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    monkeypatch.setattr("sglang_coserve.network.is_public", lambda _: is_public)
    with web_server(say_hi) as web:
        url = web.url.replace("127.0.0.1", "two.example")
        if is_public:
            assert await post(url) == "hi"
        else:
            with pytest.raises(httpx2.ConnectError, match="private"):
                await post(url)
        assert len(web.calls) == is_public


@pytest.mark.parametrize("host", ["a" * 64 + ".org", "no-such-name.invalid"])
async def test_a_name_that_leads_nowhere(host: str) -> None:
    with pytest.raises(httpx2.ConnectError, match="looked up"):
        await post(f"http://{host}")
