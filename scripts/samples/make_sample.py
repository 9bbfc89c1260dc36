"""Writes the bundled samples: ``python scripts/samples/make_sample.py [--out DIR]``.

Both samples are synthetic and follow from the seeds below; a test holds the
files in ``data/`` to this code.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from itertools import takewhile
from pathlib import Path
from typing import Final

from sample_text import Incident, diary, draw_event, draw_events
from sglang_coserve.workload.synthetic import gamma_arrivals, synthesize
from sglang_coserve.workload.trace import TraceRequest, sample_path

_Message = dict[str, str]

_SEED: Final = 20260101
_DURATION_S: Final = 600.0
_BUSY_S: Final = 40.0
_QUIET_S: Final = 80.0
_BUSY_RATE_PER_S: Final = 2.0
_QUIET_RATE_PER_S: Final = 0.5
_CV: Final = 1.5


def _online_requests(seed: int = _SEED) -> Iterator[TraceRequest]:
    """Yield ten minutes of bursty traffic at one request per second on average.

    Gamma arrivals (CV 1.5), at 2/s for 40 s and 0.5/s for 80 s in turn. Prompts
    are log-normal in 32..1024 tokens, median near 180, outputs in 8..128,
    median near 40.
    """
    # Unit-rate arrivals are bent through the inverse of the expected number of
    # arrivals over time: the load changes, the burstiness does not.
    arrivals = map(_time_of_expected, gamma_arrivals(1.0, _CV, seed))
    rng = random.Random(seed + 1)
    lengths = iter(lambda: (_length(rng, 180, 0.8, 32, 1024), _length(rng, 40, 0.7, 8, 128)), None)
    return synthesize(takewhile(lambda arrival_s: arrival_s < _DURATION_S, arrivals), lengths)


def _time_of_expected(arrivals: float) -> float:
    """Return the time by which ``arrivals`` requests are expected."""
    busy, quiet = _BUSY_S * _BUSY_RATE_PER_S, _QUIET_S * _QUIET_RATE_PER_S
    periods, rest = divmod(arrivals, busy + quiet)
    within_s = (
        rest / _BUSY_RATE_PER_S if rest < busy else _BUSY_S + (rest - busy) / _QUIET_RATE_PER_S
    )
    return periods * (_BUSY_S + _QUIET_S) + within_s


def _length(rng: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    # Drawn again rather than clamped, which would heap requests on the bounds.
    while not low <= (tokens := round(median * rng.lognormvariate(0.0, sigma))) <= high:
        pass
    return tokens


def _azure_lines(requests: Iterable[TraceRequest]) -> Iterator[str]:
    """Yield requests as lines of Azure's CSV format, header first, without line ends."""
    midnight = datetime(2026, 1, 1)
    yield "TIMESTAMP,ContextTokens,GeneratedTokens"
    for request in requests:
        seconds, ticks = divmod(round(request.arrival_s * 10**7), 10**7)
        time = midnight + timedelta(seconds=seconds)
        yield f"{time}.{ticks:07d},{request.prompt_tokens},{request.output_tokens}"


def _offline_lines(seed: int = _SEED) -> list[str]:
    """Return 400 chat requests as OpenAI batch lines, without line ends.

    Ten groups of 40 share a system prompt and few-shot examples or a text to
    read. The order is shuffled: only a scheduler that sees prefixes finds the
    groups again.
    """
    rng = random.Random(seed)
    tasks: list[tuple[str, Callable[[random.Random], list[list[_Message]]]]] = [
        *((f"classify-{name}", _classify) for name in "ab"),
        *((f"extract-{name}", _extract) for name in "ab"),
        *((f"question-{name}", _question) for name in "abcd"),
        *((f"summarize-{name}", _summarize) for name in "ab"),
    ]
    lines = []
    for name, make in tasks:
        for number, messages in enumerate(make(rng)):
            body = {
                "model": "default",
                "messages": messages,
                "max_tokens": rng.randint(16, 64),
                "temperature": 0,
            }
            line = {
                "custom_id": f"{name}-{number:02d}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
            lines.append(json.dumps(line, separators=(",", ":")))
    rng.shuffle(lines)
    return lines


_GROUP: Final = 40


def _say(role: str, content: str) -> _Message:
    return {"role": role, "content": content}


def _few_shot(
    rng: random.Random, instruction: str, answer: Callable[[Incident], str]
) -> list[list[_Message]]:
    def note() -> tuple[Incident, str]:
        event = draw_event(rng)
        return event, diary(rng, [event])

    shared = [_say("system", instruction)]
    for _ in range(5):
        event, text = note()
        shared += [_say("user", text), _say("assistant", answer(event))]
    return [[*shared, _say("user", note()[1])] for _ in range(_GROUP)]


def _classify(rng: random.Random) -> list[list[_Message]]:
    instruction = (
        "You sort the notes of a harbour office. Read the note and answer with one word that "
        "says what happened: repair, delivery, trade or loss. Do not explain your answer."
    )
    return _few_shot(rng, instruction, lambda event: event.kind)


def _extract(rng: random.Random) -> list[list[_Message]]:
    instruction = (
        "You keep the register of a harbour office. From each note take the person, the thing "
        "and the place, in this order, separated by semicolons, in the words of the note."
    )
    return _few_shot(
        rng, instruction, lambda event: f"{event.person}; {event.thing}; {event.place}"
    )


def _question(rng: random.Random) -> list[list[_Message]]:
    events = draw_events(rng, 10)
    instruction = (
        "Answer questions about the town diary below in one short sentence. Use only what the "
        f"diary says; if it does not say, answer that you do not know.\n\n{diary(rng, events)}"
    )
    questions = [
        question
        for event in events
        for question in (
            f"Who was it that {event.verb} the {event.thing}?",
            f"Where was it that {event.person} {event.verb} the {event.thing}?",
            f"When was it that {event.person} {event.verb} the {event.thing}?",
            f"What became of the {event.thing} {event.place}?",
        )
    ]
    return [[_say("system", instruction), _say("user", question)] for question in questions]


def _summarize(rng: random.Random) -> list[list[_Message]]:
    instruction = (
        "You write the weekly letter of a small harbour town. Sum up the diary page you are given "
        "in a single sentence of at most thirty words. Name the most important event first and "
        "leave out the weather."
    )
    return [
        [
            _say("system", instruction),
            _say("user", diary(rng, draw_events(rng, rng.randint(4, 17)))),
        ]
        for _ in range(_GROUP)
    ]


def main() -> None:
    """Write both samples."""
    parser = argparse.ArgumentParser(description="Write the bundled workload samples.")
    parser.add_argument(
        "--out", type=Path, default=sample_path("online").parent, help="folder to write to"
    )
    folder: Path = parser.parse_args().out
    for path, lines in (
        (folder / sample_path("online").name, _azure_lines(_online_requests())),
        (folder / sample_path("offline").name, _offline_lines()),
    ):
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
