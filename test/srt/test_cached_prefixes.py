"""Offline requests whose prefix the radix cache holds go before those whose prefix it does not."""

from __future__ import annotations

from typing import Any

import pytest

from srt import test_scheduler as scenarios
from srt.scripted_engine import ScriptedEngine

PREFIX_TOKENS, OWN_TOKENS, MEMBERS = 320, 16, 3
GROUPS = "abcdef"
PLANNED = {"offline_policy": "coserve", "startup_profile_seconds": 0.0}


def prompt(group: str, member: int) -> list[int]:
    head = scenarios.prompt(ord(group), PREFIX_TOKENS)
    return head + scenarios.prompt(1000 * ord(group) + member, OWN_TOKENS)


def first_passes(engine: ScriptedEngine, online_first: bool) -> dict[str, int]:
    """Return when each group ran first; room for two groups' prefixes. An online request has that
    of the fifth: before the offline ones arrive, or while the first ones run."""
    offline = [
        engine.request(f"{group}{member}", prompt(group, member), 2, offline=True)
        for group in GROUPS
        for member in range(MEMBERS)
    ]
    online = [engine.request("online", prompt("e", 99), 2)]
    iterations = engine.run({0: online, 8: offline} if online_first else {0: offline, 4: online})
    saved = sum(engine.reqs[f"e{member}"].cached_tokens for member in range(MEMBERS))
    assert saved >= (MEMBERS - (1 - online_first)) * (PREFIX_TOKENS - 16)
    engine.assert_nothing_leaked()
    return {
        group: min(scenarios.first_pass(iterations, f"{group}{n}") for n in range(MEMBERS))
        for group in GROUPS
    }


@pytest.mark.parametrize("online_first", [True, False], ids=["earlier", "meanwhile"])
def test_what_an_online_request_left_is_used_first(start_engine: Any, online_first: bool) -> None:
    process = start_engine(page_size=16, coserve=PLANNED)
    passes = process.call(first_passes, online_first)
    before = [group for group in GROUPS if passes[group] < passes["e"]]
    # The group that is being served, and one that was taken for its age.
    assert len(before) <= (0 if online_first else 2)
