"""The register of seams, ``seams.txt``: what we rely on in SGLang beyond its public classes.

Each section of it is a reason, which says when its names can go. The register is read without
importing SGLang: by ``scripts/sglang-seams`` for any wheel, and by tests. Public names that are
imported from SGLang need not be listed: ``seam_check`` finds our imports.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from sglang_coserve.srt.compat.requests import STATEFUL_FIELDS, STATEFUL_PARAMS
from sglang_coserve.srt.compat.versions import NEWEST, SUPPORTED, version_key

_OLDEST: Final = SUPPORTED[0]


class NameUse(StrEnum):
    """How a name is used."""

    OVERRIDDEN = "overridden"
    """A member that a subclass of ours defines, or that is assigned in SGLang's class or object."""

    CALLED = "called"
    REPLACED = "replaced"
    """A name of a module that gets another value, by ``compat.replace``."""

    READ = "read"
    RELIED = "relied"
    """Nothing of ours names it, but what it does matters."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why some names are relied on: a section of the register."""

    title: str

    why: str
    """What SGLang lacks."""

    goes_when: str
    """The change in SGLang that ends the section."""


@dataclass(frozen=True, slots=True)
class Seam:
    """A name in SGLang, and what is required of it."""

    name: str
    """Dotted, from ``sglang`` on."""

    use: NameUse

    reason: Reason

    parameters: tuple[str, ...] | None = None
    """The parameters of a function, ``self`` left out: all of them where our function takes the
    place of SGLang's, else the first ones, and the others are optional. Not checked when None."""

    passes_rest: bool = False
    """Whether our function passes further parameters on to SGLang's."""

    first: str = _OLDEST
    """The first supported version with which the name is used."""

    last: str | None = None
    """The last supported version with which the name is used; None for the newest one."""

    @property
    def is_ours(self) -> bool:
        """Whether SGLang calls our function in place of its own."""
        return self.use in (NameUse.OVERRIDDEN, NameUse.REPLACED)

    def is_in(self, version: str) -> bool:
        """Return whether the name is relied on in ``version``.

        Before the oldest supported version, and between two of them, our code does what it does
        for the nearest supported version (of two, the older one).
        """
        number = version_key(version)
        if number <= version_key(NEWEST):
            older = [key for key in map(version_key, SUPPORTED) if key <= number]
            number = max(older, default=version_key(_OLDEST))
        is_gone = self.last is not None and version_key(self.last) < number
        return version_key(self.first) <= number and not is_gone


def seams_of(version: str) -> list[Seam]:
    """Return what is relied on in a version."""
    return [seam for seam in SEAMS if seam.is_in(version)]


_TEXT: Final = r"(.+(?:\n  \S.*)*)\n"
_SECTION: Final = re.compile(rf"== (.+)\nwhy: {_TEXT}goes when: {_TEXT}")
_VERSION: Final = r"(\d+\.\d+\.\d+)"
_GROUP: Final = re.compile(rf"(\w+) ([\w.]+)(?: since {_VERSION})?(?: until {_VERSION})?")
_REST: Final = "..."
_MEMBER: Final = re.compile(r"(\w+)(?:\(([^)]*)\))?")


def listed_in(text: str) -> Iterator[Seam]:
    """Yield the seams of a register.

    Raises:
        ValueError: a section lacks its reason, or a line cannot be read.
    """
    for section in re.split(r"\n(?=== )", text)[1:]:
        head = _SECTION.match(section)
        if head is None:
            raise ValueError(f"no why, or no goes when: {section.splitlines()[0]}")
        reason = Reason(*(" ".join(part.split()) for part in head.groups()))
        lines = section[head.end() :].replace("\n" + " " * 8, " ")
        yield from _of_section(reason, lines.splitlines())


def _of_section(reason: Reason, lines: Iterable[str]) -> Iterator[Seam]:
    group = None
    for line in filter(None, lines):
        if not line.startswith("    "):
            group = _GROUP.fullmatch(line)
            if group is None:
                raise ValueError(f"{reason.title}: no use, owner and versions: {line}")
            continue
        if group is None:
            raise ValueError(f"{reason.title}: no use and owner above {line.strip()}")
        use, owner, since, until = group.groups()
        if since and until and version_key(since) > version_key(until):
            raise ValueError(f"{reason.title}: in no version: {group[0]}")
        for member in _MEMBER.finditer(line):
            name, words = f"sglang.{owner}.{member[1]}", (member[2] or "").split()
            passes_rest = words[-1:] == [_REST]
            parameters = None if member[2] is None else tuple(words[: -1 if passes_rest else None])
            seam = Seam(
                *(name, NameUse(use), reason, parameters, passes_rest),
                *(since or _OLDEST, until),
            )
            if passes_rest and not seam.is_ours:
                raise ValueError(f"{reason.title}: {_REST} is for functions of ours: {member[0]}")
            yield seam


_CONTINUED: Final = Reason(
    "Fields that keep a line from being continued",
    "A line that was interrupted goes on from its tokens. With these fields its next token depends "
    "on more than them.",
    "SGLang hands out, and takes back, the state of a request that is sampled.",
)

SEAMS: Final = (
    *listed_in(Path(__file__).with_name("seams.txt").read_text(encoding="utf-8")),
    *(
        Seam(f"sglang.srt.managers.io_struct.GenerateReqInput.{name}", NameUse.READ, _CONTINUED)
        for name in STATEFUL_FIELDS
    ),
    *(
        Seam(
            f"sglang.srt.sampling.sampling_params.SamplingParams.{name}",
            NameUse.READ,
            _CONTINUED,
        )
        for name in STATEFUL_PARAMS
    ),
)
