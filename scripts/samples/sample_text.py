"""Plain English about a small harbour town, from a seeded grammar.

A text is a list of events, so what is asked about it has a known answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

__all__ = ["Incident", "diary", "draw_event", "draw_events"]

_VERBS: Final = {
    "repair": ("mended", "repainted", "cleaned", "rebuilt", "oiled", "patched"),
    "delivery": ("unloaded", "delivered", "dropped off", "handed over", "collected", "picked up"),
    "trade": ("sold", "bought", "ordered", "rented out", "auctioned", "borrowed"),
    "loss": ("lost", "broke", "misplaced", "cracked", "scratched", "ruined"),
}
_PEOPLE: Final = (
    "Mara Quill",
    "Tobias Fenn",
    "Old Edda",
    "the baker",
    "Jonas Reed",
    "the ferry pilot",
    "Ilse Marrow",
    "Doctor Hale",
    "the lighthouse keeper",
    "Pim Ostrander",
    "Greta Low",
    "the schoolteacher",
    "Anselm Tarry",
    "the harbour clerk",
    "Wendel Brook",
    "Nadia Stroud",
)
_QUALITIES: Final = (
    "blue",
    "heavy",
    "green",
    "painted",
    "old",
    "small",
    "spare",
    "grey",
    "plain",
    "battered",
)
_THINGS: Final = (
    "ladder",
    "rowing boat",
    "lantern",
    "market stall",
    "fishing net",
    "kettle",
    "bookshelf",
    "handcart",
    "weather vane",
    "anchor",
    "school bell",
    "oil stove",
    "map case",
    "door frame",
    "barrel",
)
_PLACES: Final = (
    "at the north pier",
    "behind the town hall",
    "in the net loft",
    "near the old mill",
    "beside the fish market",
    "on Chapel Street",
    "under the stone bridge",
    "at the boat yard",
    "in the school garden",
    "outside the post office",
)
_TIMES: Final = (
    "on Monday morning",
    "late on Tuesday",
    "before noon on Wednesday",
    "on Thursday at dusk",
    "early on Friday",
    "over the weekend",
    "during the spring fair",
    "after the first storm",
)
_REMARKS: Final = (
    "The tide was low and the gulls were loud.",
    "Nobody on the quay thought much of it at first.",
    "It took most of an hour, and two neighbours came to help.",
    "Rain had been promised, but the sky stayed clear.",
    "The cost was written in the town ledger that same evening.",
    "Some people said it should have been done a year ago.",
    "A small crowd gathered and then went home for supper.",
    "The wind turned to the east and the flags came down.",
    "Coffee was served from a tin pot on the wall.",
    "The work was checked twice and found to be sound.",
)


@dataclass(frozen=True, slots=True)
class Incident:
    """Someone did something with a thing, somewhere, at some time."""

    kind: str
    """``repair``, ``delivery``, ``trade`` or ``loss``."""

    person: str
    verb: str
    thing: str
    place: str
    time: str

    def sentence(self, time_first: bool) -> str:
        """Return the event as one sentence, its time at the front or at the end."""
        done = f"{self.person} {self.verb} the {self.thing} {self.place}"
        text = f"{self.time}, {done}." if time_first else f"{done} {self.time}."
        return text[0].upper() + text[1:]


def draw_event(rng: random.Random) -> Incident:
    """Draw one event."""
    kind = rng.choice(tuple(_VERBS))
    return Incident(
        kind=kind,
        person=rng.choice(_PEOPLE),
        verb=rng.choice(_VERBS[kind]),
        thing=f"{rng.choice(_QUALITIES)} {rng.choice(_THINGS)}",
        place=rng.choice(_PLACES),
        time=rng.choice(_TIMES),
    )


def draw_events(rng: random.Random, count: int) -> list[Incident]:
    """Draw events with no two about the same thing, so that each can be asked about."""
    events: dict[str, Incident] = {}
    while len(events) < count:
        event = draw_event(rng)
        events.setdefault(event.thing, event)
    return list(events.values())


def diary(rng: random.Random, events: list[Incident]) -> str:
    """Return the events as running text with a remark after some of them."""
    sentences = []
    for event in events:
        sentences.append(event.sentence(time_first=rng.random() < 0.5))
        if rng.random() < 0.4:
            sentences.append(rng.choice(_REMARKS))
    return " ".join(sentences)
