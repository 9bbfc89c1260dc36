"""Explanations of late requests, from stories that tests write."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from sglang_coserve.core.step import Bound, PromptStop
from sglang_coserve.view import lateness
from sglang_coserve.view.lateness import explain, explanation_text, step_text

Story = dict[str, Any]

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def step(begins_s: float, ended_s: float, role: str = "waits", **more: Any) -> Story:
    """A step with one online decode that took as long as predicted."""
    seconds = ended_s - begins_s
    plan = {
        "lane": "shared",
        "predicted_s": more.pop("predicted_s", seconds),
        "predicted_online_s": more.pop("predicted_online_s", seconds),
        "budget_s": more.pop("budget_s", None),
        "bound_by": more.pop("bound_by", Bound.NONE.value),
    }
    values: Story = {
        "number": 1,
        "kind": "decode",
        "launched_s": begins_s,
        "begins_s": begins_s,
        "ended_s": ended_s,
        "measured_s": seconds,
        "planning_s": 0.0,
        "paced_s": 0.0,
        "requests": {"online": 1, "offline": 0},
        "decodes": {"online": 1, "offline": 0},
        "prompt_tokens": {"online": 0, "offline": 0},
        "is_dropped": False,
        "suspensions": [],
        "plan": plan,
        "role": role,
        "prompt_tokens_of_request": 0,
    }
    return values | more


def offline(tokens: int) -> Story:
    return {
        "kind": "extend",
        "requests": {"online": 0, "offline": 1},
        "decodes": {"online": 0, "offline": 0},
        "prompt_tokens": {"online": 0, "offline": tokens},
    }


def prefill(begins_s: float, ended_s: float, tokens: int, **more: Any) -> Story:
    values = {
        "kind": "extend",
        "decodes": {"online": 0, "offline": 0},
        "prompt_tokens": {"online": tokens, "offline": 0},
        "prompt_tokens_of_request": tokens,
    }
    return step(begins_s, ended_s, "prefill", **(values | more))


def decodes(begins_s: float, *gaps_s: float) -> list[Story]:
    steps = []
    for gap_s in gaps_s:
        steps.append(step(begins_s, begins_s + gap_s, "decode", gap_s=gap_s))
        begins_s += gap_s
    return steps


def _computed(steps: Sequence[dict[str, Any]]) -> int:
    """Prompt tokens of the request until its first token."""
    first = next((place for place, one in enumerate(steps) if "gap_s" in one), len(steps))
    return sum(one["prompt_tokens_of_request"] for one in steps[: first + 1])


def story(*steps: Story, **request: Any) -> Story:
    values = {
        "rid": "mine",
        "class": "online",
        "arrival_s": 10.0,
        "is_whole": True,
        "is_ended": True,
        "kept_from_s": None,
        "prompt_tokens": 8192,
        "batch": None,
    }
    gaps_s = [one["gap_s"] for one in steps if "gap_s" in one]
    return {
        "request": values | request,
        "tokens": len(gaps_s),
        "computed_before_first_token": _computed(steps),
        "gaps_s": gaps_s[1:],
        "with_it": sum(one["role"] != "waits" for one in steps),
        "without_it": sum(one["role"] == "waits" for one in steps),
        "steps": list(steps),
        "left_out": {"before_first_token": 0, "after": 0},
    }


def test_the_parts_of_a_late_first_token_add_up() -> None:
    found = explain(
        story(
            step(9.95, 10.06, predicted_s=0.102, **offline(1024)),
            step(10.06, 10.065),
            prefill(10.07, 10.212, 8000, gap_s=0.212, paced_s=0.004),
        )
    )
    first = found["first_token"]
    assert first["seconds"] == pytest.approx(0.212)
    assert sum(first["parts"].values()) == pytest.approx(0.212)
    expected = {"running_s": 0.06, "queued_s": 0.005, "own_s": 0.142, "paced_s": 0.004}
    expected |= {"host_s": 0.001, "unknown_s": 0.0, "prepared_s": 0.0, "grammar_s": 0.0}
    assert first["parts"] == pytest.approx(expected)
    assert (first["computed_tokens"], first["cached_tokens"]) == (8000, 192)
    assert found["verdict"] == (
        "TTFT 212 ms: 142 ms its own prompt of 8,000 tokens, 60 ms behind a step with 1,024 offline"
        " tokens (8 ms longer than predicted) that ran when it came."
    )
    assert [shown["role"] for shown in first["steps"]] == ["waits", "waits", "prefill"]
    assert first["steps"][0]["at_s"] == pytest.approx(-0.05)
    json.dumps(found)


def test_a_step_that_was_launched_ahead_counts_as_one_that_ran() -> None:
    ahead = step(10.05, 10.1, launched_s=9.99)
    found = explain(story(step(9.9, 10.05), ahead, prefill(10.1, 10.2, 8192, gap_s=0.2)))
    parts = found["first_token"]["parts"]
    assert (parts["running_s"], parts["queued_s"]) == pytest.approx((0.1, 0.0))
    assert "behind 2 steps of online requests that ran when it came" in found["verdict"]


def test_the_way_to_the_scheduler_is_told_apart_from_steps_that_ran_meanwhile() -> None:
    steps = step(9.9, 10.1), step(10.1, 10.3), prefill(10.3, 10.4, 8192, gap_s=0.4)
    sent = {"sent_s": 10.25, "queued_s": 10.28, "compiled_from_s": None}
    found = explain(story(*steps, **sent))
    parts = found["first_token"]["parts"]
    assert parts["prepared_s"] == pytest.approx(0.25)
    assert (parts["running_s"], parts["queued_s"]) == pytest.approx((0.05, 0.0))
    assert sum(parts.values()) == pytest.approx(0.4)
    assert "250 ms in the HTTP server's process, which prepared it" in found["verdict"]
    sent = {"sent_s": 10.01, "compiled_from_s": 10.1, "queued_s": 10.29}
    parts = explain(story(*steps, **sent))["first_token"]["parts"]
    assert (parts["prepared_s"], parts["grammar_s"]) == pytest.approx((0.01, 0.19))
    # A step that ran when the request was sent, and one that ran when the grammar was ready.
    assert parts["running_s"] == pytest.approx(0.09 + 0.01)
    assert sum(parts.values()) == pytest.approx(0.4)


def test_a_grammar_that_is_known_takes_no_time() -> None:
    busy = step(10.0, 10.3, predicted_s=0.1, **offline(1024))
    sent = {"sent_s": 10.001, "compiled_from_s": 10.3, "queued_s": 10.3}
    parts = explain(story(busy, prefill(10.3, 10.4, 8192, gap_s=0.4), **sent))["first_token"][
        "parts"
    ]
    assert (parts["grammar_s"], parts["running_s"]) == pytest.approx((0.0, 0.299))


def test_pacing_is_no_part_of_a_grammar_that_is_compiled() -> None:
    sent = {"sent_s": 10.0, "compiled_from_s": 10.1, "queued_s": 10.3}
    own = prefill(10.4, 10.5, 8192, gap_s=0.5, paced_s=0.35)
    parts = explain(story(own, **sent))["first_token"]["parts"]
    assert (parts["grammar_s"], parts["paced_s"]) == pytest.approx((0.2, 0.2))
    assert sum(parts.values()) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("stop", "why"),
    [
        (PromptStop.MEMORY, " for lack of KV memory"),
        (PromptStop.PACE, " since streams left no time"),
        (PromptStop.FULL, " since they were full"),
        (None, ""),
    ],
)
def test_it_is_told_why_steps_left_a_prompt_out(stop: PromptStop | None, why: str) -> None:
    left_out = step(10.0, 10.3)
    left_out["plan"]["prompt_stop"] = None if stop is None else stop.value
    verdict = explain(story(left_out, prefill(10.3, 10.4, 8192, gap_s=0.4)))["verdict"]
    assert f"behind a step of online requests that left it out{why}," in verdict


def test_it_is_told_why_a_prompt_took_several_steps() -> None:
    first, second = prefill(10.0, 10.1, 4096), prefill(10.1, 10.2, 4096, gap_s=0.2)
    first["plan"]["prompt_stop"] = PromptStop.FULL.value
    verdict = explain(story(first, second))["verdict"]
    assert "8,192 tokens in 2 steps, cut since a step may have no more tokens" in verdict


def test_the_longest_gap_names_the_step_that_made_it() -> None:
    late = step(
        10.3,
        10.4,
        "decode",
        gap_s=0.1,
        predicted_s=0.06,
        predicted_online_s=0.02,
        budget_s=0.08,
        bound_by=Bound.GAP.value,
        requests={"online": 1, "offline": 3},
        decodes={"online": 1, "offline": 2},
        prompt_tokens={"online": 0, "offline": 512},
    )
    found = explain(story(prefill(10.0, 10.2, 8192, gap_s=0.2), *decodes(10.2, *[0.02] * 5), late))
    assert found["gaps"] == pytest.approx({"tokens": 7, "p50_s": 0.02, "max_s": 0.1, "long": 1})
    assert found["verdict"].endswith(
        "longest gap 100 ms, median 20 ms: 100 ms its own step beside 514 offline tokens"
        " (40 ms longer than predicted)."
    )
    worst = found["longest_gaps"][0]
    assert worst["at_s"] == pytest.approx(0.3)
    assert worst["steps"][0]["text"] == (
        "decode step of 100 ms, predicted 60 ms (40 ms for offline work): online 1 decode and"
        " offline 2 decodes + 512 prompt tokens; at most 80 ms with offline work: the pace or"
        " a target of streams left no more"
    )
    assert len(found["longest_gaps"]) == 5


def test_a_gap_with_a_step_that_left_the_request_out() -> None:
    other = step(10.3, 10.5, prompt_tokens={"online": 4000, "offline": 0})
    own = step(10.5, 10.52, "decode", gap_s=0.22)
    found = explain(
        story(prefill(10.0, 10.2, 8192, gap_s=0.2), *decodes(10.2, *[0.02] * 5), other, own)
    )
    assert found["longest_gaps"][0]["parts"]["queued_s"] == pytest.approx(0.2)
    assert "200 ms behind a step of online requests that left it out" in found["verdict"]
    assert found["steps"] == {"with_it": 7, "without_it": 1}


def test_a_suspended_step_counts_only_while_it_runs() -> None:
    stop = {"layer": 4, "stopped_s": 10.01, "resumed_s": 10.3}
    lane = step(9.9, 10.4, suspensions=[stop], **offline(2048))
    found = explain(story(lane, prefill(10.02, 10.22, 8192, gap_s=0.22)))
    parts = found["first_token"]["parts"]
    assert (parts["running_s"], parts["own_s"]) == pytest.approx((0.01, 0.2))
    assert parts["host_s"] == pytest.approx(0.01)
    assert "suspended once, for 290 ms" in found["first_token"]["steps"][0]["text"]


def test_it_says_what_is_not_known() -> None:
    gone = explain(story(*decodes(10.0, 0.02, 0.02), is_whole=False))
    assert gone["first_token"] is None
    assert gone["verdict"].startswith("TTFT unknown: its first steps are no longer kept")
    assert gone["longest_gaps"][0]["at_s"] is None
    waited = explain(story(prefill(12.0, 12.5, 8192, gap_s=2.5), kept_from_s=11.5))
    assert waited["first_token"]["parts"]["unknown_s"] == pytest.approx(1.5)
    assert "1,500 ms in steps that are no longer known" in waited["verdict"]
    queued = story(prefill(12.0, 12.5, 8192, gap_s=2.5)) | {
        "left_out": {"before_first_token": 40, "after": 0}
    }
    assert explain(queued)["first_token"]["parts"]["unknown_s"] == pytest.approx(2.0)
    running = explain(story(prefill(10.0, 10.1, 512), is_ended=False))
    assert running["verdict"] == "It has no token; it has not ended, or was aborted."


def test_an_answer_is_bounded() -> None:
    waits = [step(10 + number * 0.01, 10.01 + number * 0.01) for number in range(3000)]
    found = explain(
        story(*waits, prefill(40.0, 40.1, 8192, gap_s=30.1), *decodes(40.1, *[0.02] * 3000))
    )
    assert len(json.dumps(found)) < 20_000
    assert found["first_token"]["steps_left_out"] == 2996
    assert found["gaps"]["tokens"] == 3001


@pytest.mark.parametrize("bound", Bound)
def test_every_bound_has_words(bound: Bound) -> None:
    text = step_text(step(0.0, 0.1, budget_s=0.0, bound_by=bound.value))
    assert (lateness._BOUNDS[bound] in text) == (bound is not Bound.NONE)


def test_a_step_without_a_plan_and_one_that_was_given_up() -> None:
    stop = {"layer": 4, "stopped_s": 0.05, "resumed_s": 0.3}
    lost = step(0.0, 0.3, is_dropped=True, suspensions=[stop], plan=None, measured_s=None)
    text = step_text(lost)
    assert text.startswith("decode step of 50 ms, not planned")
    assert text.endswith("given up, its work lost")


def test_the_text_for_a_terminal() -> None:
    found = explain(story(prefill(10.0, 10.2, 8192, gap_s=0.2), *decodes(10.2, 0.02, 0.06)))
    lines = explanation_text(found).splitlines()
    assert lines[0] == "mine: online, 8,192 prompt tokens, 3 output tokens in kept steps"
    assert lines[1] == found["verdict"]
    assert "first token of 200 ms, from 0.000 s" in lines
    assert "gap of 60 ms, from 0.220 s" in lines


def test_the_documented_limits_are_those_that_code_sets() -> None:
    """Each row names the functions that set its limit."""
    section = DOCS.read_text().partition("### What limited offline work")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|", section, re.M)[1:])
    assert rows.keys() == {bound.value for bound in Bound}
    for value, where in rows.items():
        for path, functions in re.findall(r"`(\S+)\.py`((?: `[\w.]+`,?)*)", where):
            module = importlib.import_module(f"sglang_coserve.core.{path.replace('/', '.')}")
            for function in re.findall(r"`([\w.]+)`", functions):
                set_here = inspect.getsource(attrgetter(function)(module))
                assert f"Bound.{value.upper()}" in set_here, (value, function)
