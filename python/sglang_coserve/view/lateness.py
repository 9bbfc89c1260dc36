"""The explanation of a request's latencies, from the steps that the engine ran meanwhile.

The input is a story, as ``StepRing.of_request`` tells it. The explanation is what
``/coserve/steps/{id}`` answers, and what the page and ``coserve why`` show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest
from statistics import median
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from sglang_coserve.core.step import Bound, PromptStop

_LONGEST_GAPS: Final = 5
_GAPS_IN_TEXT: Final = 3
_LONGEST_STEPS: Final = 5
"""Steps that are shown of each wait: the steps that took most of it."""

_LEAST_SHARE: Final = 0.05
"""Smaller parts of a wait are not worth a word."""

_OVERDUE_SHARE: Final = 0.05
_OVERDUE_S: Final = 0.001
"""A step was longer than predicted if it was by this share of the prediction and this time."""

_LONG_GAP: Final = 1.5
"""A gap is long from so many times the median."""

_BOUNDS: Final = {
    Bound.NONE: "no online target applied",
    Bound.BUDGET: "a fixed time per step",
    Bound.GAP: "the pace or a target of streams left no more",
    Bound.PROMPT: "the first token of an online prompt was due",
    Bound.PROMPTS_WAIT: "first tokens of online prompts might be delayed no more",
    Bound.ARRIVAL: "an online request that arrived meanwhile might not wait longer",
    Bound.LEAST_PIECE: "the shortest piece of a prompt beside streams",
    Bound.LEAST_STEP: "the shortest step that was worth its fixed cost",
    Bound.SUSPENDED: "a suspended step was to go on first",
    Bound.PROMPTS_FIRST: "online prompts were computed alone",
    Bound.PROMPT_LEFT: "more of an online prompt was still to be computed",
    Bound.KV: "offline work had slowed online decodes, whose KV the next prompts need",
    Bound.LANE: "the step could be suspended for online work",
}
"""The reason for the limit of a step's offline work."""

_LEFT_OUT: Final = {
    PromptStop.MEMORY.value: " for lack of KV memory",
    PromptStop.PACE.value: " since streams left no time",
    PromptStop.FULL.value: " since they were full",
}
"""The reason why steps left a waiting prompt out."""

_CUT: Final = {
    PromptStop.PACE.value: ", cut since streams left no more time",
    PromptStop.FULL.value: ", cut since a step may have no more tokens",
}
"""The reason why a prompt took several steps."""

Step = Mapping[str, Any]


_CAUSES: Final = (
    *("prepared_s", "grammar_s", "own_s", "running_s", "queued_s", "paced_s", "host_s"),
    "unknown_s",
)
"""Causes of a wait: the HTTP server's process, until it sent the request to the scheduler; its
grammar being compiled; steps with the request; steps without it, launched before it came to the
scheduler, and later; launches held back; the host; and steps that are no longer kept."""


class _Part(NamedTuple):
    """A time in which a step ran without a suspension."""

    begins_s: float
    ended_s: float
    step: Step


class _Wait(NamedTuple):
    """A time in which a request waited for a token: its beginning, and its parts by cause."""

    begins_s: float
    ended_s: float
    came_s: float | None
    """Time at which the request came to the scheduler, if the wait is for its first token."""

    parts: Mapping[str, float]
    steps: Sequence[tuple[Step, float]]
    """Steps that took a part of it, and the seconds of the part; in order of time."""


def explain(story: Mapping[str, Any]) -> dict[str, Any]:
    """Return the explanation of a request as JSON has it; docs/metrics.md has its fields.

    O(n log n) of the story's steps.
    """
    request, steps = story["request"], story["steps"]
    is_whole = request["is_whole"]
    start_s = request["arrival_s"] if is_whole else None
    parts = sorted([part for step in steps for part in _parts(step)], key=_begin)
    tokens = [step for step in steps if "gap_s" in step]
    left_out, gaps_s = story["left_out"], story["gaps_s"]
    first = None
    if is_whole and tokens:
        first = _first_token(request, parts, tokens[0], left_out["before_first_token"])
    longest = [
        _wait(parts, step["ended_s"] - step["gap_s"], step["ended_s"], left_out=left_out["after"])
        for step in nlargest(_LONGEST_GAPS, tokens[1:], key=lambda step: step["gap_s"])
    ]
    usual_s = median(gaps_s) if gaps_s else None
    return {
        **{name: request[name] for name in ("rid", "class", "is_whole", "is_ended")},
        "prompt_tokens": request.get("prompt_tokens"),
        "batch": request.get("batch"),
        "verdict": _verdict(request, first, gaps_s, longest),
        "first_token": None
        if first is None
        else _shown(first, start_s) | _prompt(request, story["computed_before_first_token"]),
        "gaps": {
            "tokens": story["tokens"],
            "p50_s": usual_s,
            "max_s": max(gaps_s, default=None),
            "long": sum(gap_s > _LONG_GAP * (usual_s or 0.0) for gap_s in gaps_s),
        },
        "longest_gaps": [_shown(wait, start_s) for wait in longest],
        "steps": {name: story[name] for name in ("with_it", "without_it")},
    }


def _first_token(
    request: Mapping[str, Any], parts: Sequence[_Part], step: Step, left_out: int
) -> _Wait:
    # A server of an earlier version does not say how a request came to its scheduler.
    arrival_s, queued_s = request["arrival_s"], request.get("queued_s")
    sent_s, compiled_from_s = request.get("sent_s"), request.get("compiled_from_s")
    aside = {"prepared_s": (arrival_s, arrival_s if sent_s is None else sent_s)}
    if compiled_from_s is not None:
        aside["grammar_s"] = (compiled_from_s, queued_s)
    return _wait(
        parts,
        arrival_s,
        step["ended_s"],
        came_s=arrival_s if queued_s is None else queued_s,
        aside=aside,
        kept_from_s=request["kept_from_s"],
        left_out=left_out,
    )


def _begin(part: _Part) -> float:
    return part.begins_s


def _parts(step: Step) -> Iterator[_Part]:
    begins_s = step["begins_s"]
    for stop in step["suspensions"]:
        yield _Part(begins_s, stop["stopped_s"], step)
        begins_s = stop["resumed_s"]
    if not step["is_dropped"]:
        yield _Part(begins_s, step["ended_s"], step)


def _wait(
    parts: Sequence[_Part],
    begins_s: float,
    ended_s: float,
    *,
    came_s: float | None = None,
    aside: Mapping[str, tuple[float, float]] = MappingProxyType({}),
    kept_from_s: float | None = None,
    left_out: int = 0,
) -> _Wait:
    """Return what each moment of a wait went to; the parts add up to the wait.

    Args:
        parts: Times in which steps ran, in order.
        begins_s: The beginning of the wait.
        ended_s: Its end.
        came_s: Time at which the request came to the scheduler, if the wait is for its first token.
        aside: Causes outside of steps, with beginning and end. Steps that ran meanwhile did not
            delay the request.
        kept_from_s: Steps that began earlier are no longer kept. None if all are kept.
        left_out: Number of steps that are not among ``parts``. If there are any, what ran beside
            the others is not known.
    """
    idle = "unknown_s" if left_out else "host_s"
    spent = dict.fromkeys(_CAUSES, 0.0)
    taken: dict[int, list[Any]] = {}
    spans = [
        (cause, max(from_s, begins_s), min(until_s, ended_s))
        for cause, (from_s, until_s) in aside.items()
    ]
    for cause, from_s, until_s in spans:
        spent[cause] = max(until_s - from_s, 0.0)
        parts = list(_without(parts, from_s, until_s))

    def idle_s(from_s: float, until_s: float) -> float:
        """Return the time between two steps that has no other cause."""
        known = [max(min(b, until_s) - max(a, from_s), 0.0) for _, a, b in spans]
        return max(until_s - from_s, 0.0) - sum(known)

    at_s = begins_s
    if kept_from_s is not None and kept_from_s > at_s:
        at_s = min(kept_from_s, ended_s)
        spent["unknown_s"] = idle_s(begins_s, at_s)
    for part_begins_s, part_ended_s, step in parts:
        part_ended_s = min(part_ended_s, ended_s)
        if part_ended_s <= at_s or part_begins_s >= ended_s:
            continue
        is_own = step["role"] != "waits"
        waited_s = idle_s(at_s, part_begins_s)
        paced_s = min(step["paced_s"], waited_s) if is_own else 0.0
        spent["paced_s"] += paced_s
        spent[idle] += waited_s - paced_s
        seconds = part_ended_s - max(part_begins_s, at_s)
        had_begun = came_s is not None and step["launched_s"] < came_s
        spent["own_s" if is_own else "running_s" if had_begun else "queued_s"] += seconds
        taken.setdefault(id(step), [step, 0.0])[1] += seconds
        at_s = part_ended_s
    spent[idle] += idle_s(at_s, ended_s)
    steps = [(step, seconds) for step, seconds in taken.values()]
    return _Wait(begins_s, ended_s, came_s, spent, steps)


def _without(parts: Sequence[_Part], from_s: float, until_s: float) -> Iterator[_Part]:
    """Yield the parts, without what is between two times."""
    for part in parts:
        if part.begins_s < from_s:
            yield part._replace(ended_s=min(part.ended_s, from_s))
        if part.ended_s > until_s:
            yield part._replace(begins_s=max(part.begins_s, until_s))


def _shown(wait: _Wait, start_s: float | None) -> dict[str, Any]:
    most = nlargest(_LONGEST_STEPS, wait.steps, key=lambda taken: taken[1])
    chosen = {id(step) for step, _ in most}
    return {
        "at_s": None if start_s is None else wait.begins_s - start_s,
        "seconds": wait.ended_s - wait.begins_s,
        "parts": dict(wait.parts),
        "steps": [
            _step(step, seconds, start_s) for step, seconds in wait.steps if id(step) in chosen
        ],
        "steps_left_out": len(wait.steps) - len(chosen),
    }


def _prompt(request: Mapping[str, Any], computed: int) -> dict[str, int]:
    cached = max(request["prompt_tokens"] - computed, 0)
    return {"computed_tokens": computed, "cached_tokens": cached}


def _step(step: Step, of_wait_s: float, start_s: float | None) -> dict[str, Any]:
    names = ("number", "kind", "role", "requests", "decodes", "prompt_tokens")
    plan = step["plan"] or {}
    return {
        **{name: step[name] for name in names},
        "at_s": None if start_s is None else step["begins_s"] - start_s,
        "of_wait_s": of_wait_s,
        "seconds": _seconds(step),
        "predicted_s": plan.get("predicted_s"),
        "budget_s": plan.get("budget_s"),
        "bound_by": plan.get("bound_by"),
        "suspensions": len(step["suspensions"]),
        "is_dropped": step["is_dropped"],
        "text": step_text(step),
    }


# --- In words ----------------------------------------------------------------------------------


def step_text(step: Step) -> str:
    """Return a step of ``StepRing`` in a sentence."""
    name = f"{step['kind'] or 'other'} step of {_ms(_seconds(step))}"
    plan = step["plan"]
    if plan is None:
        name += ", not planned"
    else:
        name += f", predicted {_ms(plan['predicted_s'])}"
        offline_s = plan["predicted_s"] - plan["predicted_online_s"]
        if step["requests"]["offline"] and step["requests"]["online"] and offline_s > 0:
            name += f" ({_ms(offline_s)} for offline work)"
    said = [name + ": " + " and ".join(_content(step) or ["no request"])]
    if plan is not None and plan["bound_by"] != Bound.NONE.value:
        said.append(_limit(plan))
    if stops := step["suspensions"]:
        stopped_s = sum(stop["resumed_s"] - stop["stopped_s"] for stop in stops)
        said.append(f"suspended {_times(len(stops))}, for {_ms(stopped_s)}")
    if step["is_dropped"]:
        said.append("given up, its work lost")
    return "; ".join(said)


def _content(step: Step) -> list[str]:
    said = []
    for kind in ("online", "offline"):
        decodes, tokens = step["decodes"][kind], step["prompt_tokens"][kind]
        parts = [_count(decodes, "decode")] if decodes else []
        parts += [_count(tokens, "prompt token")] if tokens else []
        if parts:
            said.append(f"{kind} {' + '.join(parts)}")
    return said


def _limit(plan: Mapping[str, Any]) -> str:
    known = {bound.value: text for bound, text in _BOUNDS.items()}
    # A server of another version may know other reasons.
    reason = known.get(plan["bound_by"], plan["bound_by"])
    budget_s = plan["budget_s"]
    if budget_s is None:
        return f"no limit: {reason}"
    if budget_s <= 0:
        return f"no offline work allowed: {reason}"
    return f"at most {_ms(budget_s)} with offline work: {reason}"


def _verdict(
    request: Mapping[str, Any],
    first: _Wait | None,
    gaps_s: Sequence[float],
    longest: Sequence[_Wait],
) -> str:
    said = []
    if not request["is_whole"]:
        said.append("TTFT unknown: its first steps are no longer kept")
    elif first is None:
        said.append("It has no token")
    else:
        own = _own_prompt(first)
        said.append(f"TTFT {_ms(first.ended_s - first.begins_s)}: {_causes(first, own)}")
    if gaps_s:
        worst_s, usual_s = max(gaps_s), median(gaps_s)
        if worst_s > _LONG_GAP * usual_s:
            causes = _causes(longest[0], _own_decode(longest[0]))
            said.append(f"longest gap {_ms(worst_s)}, median {_ms(usual_s)}: {causes}")
        else:
            said.append(f"gaps even: median {_ms(usual_s)}, longest {_ms(worst_s)}")
    if not request["is_ended"]:
        said.append("it has not ended, or was aborted")
    return "; ".join(said) + "."


def _causes(wait: _Wait, own: str) -> str:
    """Return the parts of a wait in words, the largest first; small ones are left out."""
    without = [step for step, _ in wait.steps if step["role"] == "waits"]
    came_s = wait.begins_s if wait.came_s is None else wait.came_s
    running = [step for step in without if step["launched_s"] < came_s]
    later = [step for step in without if step["launched_s"] >= came_s]
    left_out = later if wait.parts["running_s"] else without
    why = "" if wait.came_s is None else _reason(left_out, _LEFT_OUT)
    words = {
        "prepared_s": "in the HTTP server's process, which prepared it",
        "grammar_s": "while its grammar was compiled",
        "own_s": own,
        "running_s": f"behind {_several(running)} that ran when it came",
        "queued_s": f"behind {_several(left_out)} that left it out{why}",
        "paced_s": "held back by pacing, so that its step could have newer requests",
        "host_s": "on the host, with no step running",
        "unknown_s": "in steps that are no longer known",
    }
    total_s = sum(wait.parts.values())
    ordered = sorted(wait.parts, key=lambda cause: -wait.parts[cause])
    told = [
        name
        for place, name in enumerate(ordered)
        if not place or wait.parts[name] >= _LEAST_SHARE * total_s
    ]
    return ", ".join(f"{_ms(wait.parts[name])} {words[name]}" for name in told)


def _own_prompt(wait: _Wait) -> str:
    own = [step for step, _ in wait.steps if step["role"] != "waits"]
    tokens = sum(step["prompt_tokens_of_request"] for step in own)
    steps = f" in {len(own)} steps{_reason(own[:-1], _CUT)}" if len(own) > 1 else ""
    return f"its own prompt of {_count(tokens, 'token')}{steps}{_beside(own)}"


def _reason(steps: Sequence[Step], words: Mapping[str, str]) -> str:
    """Return the most frequent reason why steps had not all online prompts, in words; "" if the
    steps say none."""
    stops = Counter((step["plan"] or {}).get("prompt_stop") for step in steps)
    return words.get(stops.most_common(1)[0][0] or "", "") if stops else ""


def _own_decode(wait: _Wait) -> str:
    own = [step for step, _ in wait.steps if step["role"] != "waits"]
    return f"its own {'steps' if len(own) > 1 else 'step'}{_beside(own)}"


def _beside(own: Sequence[Step]) -> str:
    """Return what else was in the steps of a request, and how much too long they were."""
    offline = _offline_tokens(own)
    others = sum(
        step["prompt_tokens"]["online"] - step["prompt_tokens_of_request"]
        for step in own
        if step["prompt_tokens"]["online"]
    )
    beside = [f"{_count(others, 'prompt token')} of other online requests"] if others > 0 else []
    beside += [_count(offline, "offline token")] if offline else []
    return (f" beside {' and '.join(beside)}" if beside else "") + _overdue(own)


def _several(steps: Sequence[Step]) -> str:
    offline = _offline_tokens(steps)
    name = "a step" if len(steps) == 1 else f"{len(steps):,} steps"
    with_offline = f"with {_count(offline, 'offline token')}" if offline else "of online requests"
    return f"{name} {with_offline}{_overdue(steps)}"


def _offline_tokens(steps: Sequence[Step]) -> int:
    return sum(step["prompt_tokens"]["offline"] + step["decodes"]["offline"] for step in steps)


def _overdue(steps: Sequence[Step]) -> str:
    # A suspended step held nobody up to its end.
    ran = [step for step in steps if step["plan"] and not step["suspensions"]]
    planned = [(_seconds(step), step["plan"]["predicted_s"]) for step in ran]
    predicted_s = sum(predicted for _, predicted in planned)
    over_s = sum(seconds for seconds, _ in planned) - predicted_s
    if over_s < max(_OVERDUE_S, _OVERDUE_SHARE * predicted_s):
        return ""
    return f" ({_ms(over_s)} longer than predicted)"


def _seconds(step: Step) -> float:
    """Return how long a step ran: as measured, or else from its beginning to its results."""
    measured_s = step["measured_s"]
    if measured_s is not None:
        return float(measured_s)
    return sum(part.ended_s - part.begins_s for part in _parts(step))


def explanation_text(explanation: Mapping[str, Any]) -> str:
    """Return an explanation as lines of text for a terminal."""
    about = [explanation["class"]]
    if explanation["prompt_tokens"] is not None:
        about.append(_count(explanation["prompt_tokens"], "prompt token"))
    about.append(_count(explanation["gaps"]["tokens"], "output token") + " in kept steps")
    if explanation["batch"] is not None:
        about.append(str(explanation["batch"]))
    lines = [f"{explanation['rid']}: {', '.join(about)}", explanation["verdict"]]
    if (first := explanation["first_token"]) is not None:
        lines += _wait_lines("first token", first)
    for gap in explanation["longest_gaps"][:_GAPS_IN_TEXT]:
        lines += _wait_lines("gap", gap)
    return "\n".join(lines)


def _wait_lines(name: str, wait: Mapping[str, Any]) -> Iterator[str]:
    at = f", from {wait['at_s']:.3f} s" if wait["at_s"] is not None else ""
    yield f"\n{name} of {_ms(wait['seconds'])}{at}"
    for step in wait["steps"]:
        whose = "without it" if step["role"] == "waits" else "with it"
        yield f"  {_ms(step['of_wait_s']):>8}  {whose}: {step['text']}"
    if wait["steps_left_out"]:
        yield f"  and {_count(wait['steps_left_out'], 'shorter step')}"


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"
