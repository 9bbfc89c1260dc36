"""What co-serving relies on in SGLang beyond its public classes, by dotted names: ``seams.txt``.

Read without importing SGLang: by ``scripts/sglang-seams`` for any wheel, and by tests. What is
imported from SGLang need not be listed: ``seam_check`` finds our imports.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from sglang_coserve.srt.compat.requests import STATEFUL_FIELDS, STATEFUL_PARAMS
from sglang_coserve.srt.compat.versions import SUPPORTED, uses_v23, version_key

_OLDEST: Final = SUPPORTED[0]


class NameUse(StrEnum):
    """How a name is used."""

    OVERRIDDEN = "overridden"
    """A method that a subclass of ours replaces, or that is replaced in SGLang's class."""

    CALLED = "called"
    REPLACED = "replaced"
    """A name of a module that gets another value, by ``compat.replace``."""

    READ = "read"


@dataclass(frozen=True, slots=True)
class Seam:
    """A name in SGLang, and what is required of it."""

    name: str
    """Dotted, from ``sglang`` on."""

    use: NameUse

    parameters: tuple[str, ...] | None = None
    """The first parameters of a function, ``self`` left out; it needs no others. Not checked
    when None."""

    first: str = _OLDEST
    """The first version that has it."""

    is_only_in_v17: bool = False
    """Whether ``v23`` does without it."""

    def is_in(self, version: str) -> bool:
        """Return whether it is relied on in ``version``, also in one that is not supported: by
        what ``by_version`` would choose for it."""
        if not uses_v23(version):
            return self.first == _OLDEST
        return not self.is_only_in_v17 and version_key(self.first) <= version_key(version)


def seams_of(version: str) -> list[Seam]:
    """Return what is relied on in a version."""
    return [seam for seam in SEAMS if seam.is_in(version)]


_GROUP: Final = re.compile(r"(\w+) ([\w.]+)(?: since (\S+)| only (0\.5\.17))?")
_MEMBER: Final = re.compile(r"(\w+)(?:\(([^)]*)\))?")


def _listed(text: str) -> Iterator[Seam]:
    group = None
    for line in text.splitlines():
        if not line.startswith("    "):
            group = _GROUP.fullmatch(line)
            continue
        assert group is not None, line
        use, owner, since, only = group.groups()
        for member in _MEMBER.finditer(line):
            parameters = None if member[2] is None else tuple(member[2].split())
            name = f"sglang.{owner}.{member[1]}"
            yield Seam(name, NameUse(use), parameters, since or _OLDEST, only is not None)


SEAMS: Final = (
    *_listed(Path(__file__).with_name("seams.txt").read_text(encoding="utf-8")),
    *(
        Seam(f"sglang.srt.managers.io_struct.GenerateReqInput.{name}", NameUse.READ)
        for name in STATEFUL_FIELDS
    ),
    *(
        Seam(f"sglang.srt.sampling.sampling_params.SamplingParams.{name}", NameUse.READ)
        for name in STATEFUL_PARAMS
    ),
)
