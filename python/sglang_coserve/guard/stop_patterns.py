"""Searches outputs for ``stop_regex`` in linear time.

SGLang searches the output of a request for it after every token, in the scheduler, with Python's
``re``: nested repetitions can take exponential time. The regex engine behind pydantic's string
patterns searches in linear time; it supports neither look-around nor back-references, which need
backtracking.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, Any, Final

from pydantic import StringConstraints, TypeAdapter, ValidationError

from sglang_coserve.replacements import replace

_MOST_STATES: Final = 500
"""Positions of all patterns of a request, their repetitions expanded. At worst each is visited for
each character: 0.2 s for the 16,000 of a long output, and 3 s with 2,000 positions, on a slow core.
"""

_STATES_OF_PATTERN: Final = 10
"""What a pattern counts for besides: to prepare an empty one takes a millisecond there."""

_STATES_OF_CATEGORY: Final = {
    **dict.fromkeys(("CATEGORY_WORD", "CATEGORY_NOT_WORD"), 50),
    **dict.fromkeys(("CATEGORY_DIGIT", "CATEGORY_NOT_DIGIT"), 10),
}
"""Of Unicode: those of letters have hundreds of ranges, and take 2 ms to prepare there."""

_MOST_KEPT: Final = 1024
"""Patterns that are kept prepared: those of twenty requests with as many as they may have."""


def check_stop_patterns(patterns: Iterable[str]) -> None:
    """Check that the patterns of a request can be searched for in linear time. O(patterns).

    Raises:
        ValueError: one is malformed, or needs backtracking, or they are too large.
    """
    states = 0
    try:
        for pattern in patterns:
            with warnings.catch_warnings(action="ignore"):
                parsed = re._parser.parse(pattern)  # type: ignore[attr-defined]
            states += _STATES_OF_PATTERN + _num_states(parsed)
            if states > _MOST_STATES:
                raise ValueError(
                    f"it has {states} positions with its repetitions written out: use at most "
                    f"{_MOST_STATES}, of all patterns together"
                )
            _searcher(pattern)
    except RecursionError:
        raise ValueError("stop_regex is nested too deeply") from None
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ValueError(f"stop_regex cannot be used: {lines[-1] if lines else error}") from None


def install_stop_patterns() -> None:
    """Make SGLang's scheduler in this process search for stop patterns in linear time."""
    replace("sglang.srt.managers.schedule_batch.re", LinearSearch())


class LinearSearch:
    """The part of the module ``re`` that SGLang's requests use."""

    error = re.error

    def search(self, pattern: str, text: str) -> bool | None:
        """Return True if ``text`` contains ``pattern``, else None. O(text).

        Raises:
            re.error: the pattern is not supported; ``check_stop_patterns`` would refuse it.
        """
        try:
            _searcher(pattern).validate_python(text)
        except ValidationError:
            return None
        except Exception as error:
            raise re.error(str(error)) from None
        return True


@lru_cache(maxsize=_MOST_KEPT)
def _searcher(pattern: str) -> TypeAdapter[str]:
    return TypeAdapter(Annotated[str, StringConstraints(pattern=pattern)])


def _num_states(parsed: Any) -> int:
    """Return the number of positions of a parsed pattern, repetitions expanded."""
    total = 0
    for operation, value in parsed:
        name = str(operation)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, most, inner = value
            is_endless = most == re._parser.MAXREPEAT  # type: ignore[attr-defined]
            # Without an end it loops in states of its own.
            times = least + 1 if is_endless else most
            total += times * _num_states(inner)
        elif name == "SUBPATTERN":
            total += _num_states(value[-1])
        elif name == "BRANCH":
            total += sum(_num_states(branch) for branch in value[1])
        elif name == "IN":
            total += max(_STATES_OF_CATEGORY.get(str(member), 1) for _, member in value)
        else:
            total += 1
    return total
