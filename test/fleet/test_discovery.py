"""Engines from a list and a name."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Sequence

import pytest

from sglang_coserve.errors import ConfigError, ServerError
from sglang_coserve.fleet.discovery import DnsName, EngineList, EngineSource, follow
from waiting import until


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


async def test_a_name_that_is_denied_for_long_has_no_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first two minutes of a name, as seconds and what the resolver says."""
    loop = asyncio.get_running_loop()
    answer: list[object] = [(0, 0, 0, "", ("10.0.0.1", 1))]

    async def getaddrinfo(*_: object, **__: object) -> list[object]:
        if isinstance(answer[0], int):
            raise socket.gaierror(answer[0], "cannot be looked up")
        return answer

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo, raising=False)
    now_s = 0.0
    monkeypatch.setattr(loop, "time", lambda: now_s)
    name = DnsName("http://engines:1")
    there, denied, away = answer[0], socket.EAI_NONAME, socket.EAI_AGAIN
    for now_s, answer[0], found in (  # noqa: B007
        (0.0, there, ["http://10.0.0.1:1"]),
        (5.0, denied, None),
        (50.0, away, None),  # No resolver answers.
        (66.0, denied, None),
        (125.0, denied, None),
        (126.0, denied, []),
        (131.0, there, ["http://10.0.0.1:1"]),
        (136.0, denied, None),
    ):
        if found is None:
            with pytest.raises(ServerError, match="cannot be resolved"):
                await name.urls()
        else:
            assert await name.urls() == found


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
