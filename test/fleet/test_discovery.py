"""Engines from a list, a name and a router."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from sglang_coserve.errors import ConfigError, ServerError
from sglang_coserve.fleet.discovery import DnsName, EngineList, EngineSource, Router, follow
from waiting import until
from web_server import Call, web_server


@pytest.fixture
def router() -> Iterator[SimpleNamespace]:
    """Answers ``/workers`` with ``content``, as routers do, for one key."""
    router = SimpleNamespace(content=b"{}")

    def workers(call: Call) -> None:
        is_allowed = call.headers.get("authorization") == "Bearer router's key"
        call.answer(200 if is_allowed and call.path == "/workers" else 401, router.content)

    with web_server(workers) as server:
        router.url = server.url
        yield router


def urls(source: EngineSource) -> Sequence[str]:
    return asyncio.run(source.urls())  # type: ignore[arg-type]


def test_a_name_stands_for_all_of_its_addresses() -> None:
    found = urls(DnsName("http://localhost:1234"))
    assert "http://127.0.0.1:1234" in found
    # That of a scheme, too.
    assert "http://127.0.0.1:80" in urls(DnsName("http://localhost:80"))
    with pytest.raises(ServerError, match="cannot be resolved"):
        urls(DnsName(f"http://{'a' * 80}:1"))
    with pytest.raises(ServerError, match="cannot be resolved"):
        urls(DnsName("http://no-such-name.invalid:1"))
    bad_ones = ("localhost", "https://localhost:1", "http://localhost", "http://localhost:1/v1")
    for bad in (*bad_ones, "http://user:pw@localhost:1"):
        with pytest.raises(ConfigError):
            DnsName(bad)


@pytest.mark.parametrize("key", ["secret\n", "schlüssel"])
def test_a_routers_key_that_no_header_can_carry(key: str) -> None:
    with pytest.raises(ConfigError, match="line break") as caught:
        Router("http://router:1", key)
    assert key not in str(caught.value)


def test_a_router_is_asked_without_the_environments_proxy(
    router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    router.content = b'{"workers": [{"url": "http://a:1"}]}'
    assert urls(Router(router.url, "router's key")) == ["http://a:1"]


def test_authorities_are_read_beside_the_event_loop(
    router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, threads = httpx.create_ssl_context, []

    def made() -> Any:
        threads.append(threading.current_thread())
        return make()

    monkeypatch.setattr(httpx, "create_ssl_context", made)
    router.content = b'{"workers": []}'
    assert urls(Router(router.url, "router's key")) == []
    assert threads and threading.current_thread() not in threads


def test_a_router_tells_its_workers(router: Any) -> None:
    workers = [
        {"id": "1", "url": "http://10.0.0.1:30000", "is_healthy": False},
        {"id": "2", "url": "http://10.0.0.2:30000/"},
        {"id": "3", "url": "http://10.0.0.3:30000@1"},
    ]
    router.content = json.dumps({"workers": workers, "total": 2}).encode()
    found = urls(Router(router.url, "router's key"))
    assert found == [f"http://10.0.0.{number}:30000" for number in (1, 2, 3)]
    with pytest.raises(ServerError, match="401"):
        urls(Router(router.url))
    # Whether an address can be used is for the fleet: the others can.
    mixed = [{"url": "grpc://x:1"}, {"id": "4"}, {"url": "http://y:1", "new": {}}]
    router.content = json.dumps({"workers": mixed}).encode()
    assert urls(Router(router.url, "router's key")) == ["grpc://x:1", "http://y:1"]
    for content in (b"", b"[]", b'{"workers": [{}]}', b'{"workers": [7]}'):
        router.content = content
        with pytest.raises(ServerError, match="does not list workers"):
            urls(Router(router.url, "router's key"))


class Changing(EngineSource):
    def __init__(self, *answers: list[str] | None) -> None:
        self.answers = list(answers)
        self.failures = itertools.cycle([ServerError("no answer"), KeyError("a bug")])

    async def urls(self) -> Sequence[str]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            raise next(self.failures)
        return answer


async def test_a_source_that_fails_takes_no_engine_away() -> None:
    told: list[Sequence[str]] = []
    sources = [Changing(["http://b"], None, None, ["http://c"]), EngineList(["http://a/"])]
    following = asyncio.create_task(follow(sources, told.append, 0.001))
    await until(lambda: len(told) >= 5)
    following.cancel()
    assert told[:5] == [["http://b", "http://a"]] * 3 + [["http://c", "http://a"]] * 2
