"""Stock SGLang as an expert would run both loads on it: what is tried, and what counts.

*Tuned*: online requests have the higher priority, decodes ride with prompts, in chunks of N
tokens. *Interleaved*: online requests have the higher priority, and after each chunk of N tokens
comes a step of decodes alone, where SGLang has that option. *Refinements* are tried on the best of
these. The setting counts that has the best P99 TTFT with as many offline tokens/s as ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sglang_coserve.srt import compat
from sglang_coserve.srt.start_defaults import as_flags

CHUNK_TOKENS: Final = (128, 256, 512, 1024, 2048)
REFINEMENTS: Final[tuple[Mapping[str, Any], ...]] = (
    # Requests of the lowest priority lose their memory first, not those with the fewest outputs.
    {"retraction_policy": "priority"},
    # Of equal priority, the longest output first.
    {"schedule_policy": "lof"},
)
Candidate = tuple[float, float]
"""P99 TTFT in ms, offline tokens/s."""


def tuned(chunk_tokens: int) -> dict[str, Any]:
    """Return fields of ``ServerArgs``."""
    return {
        "enable_priority_scheduling": True,
        "enable_mixed_chunk": True,
        "chunked_prefill_size": chunk_tokens,
    }


def interleaved(chunk_tokens: int) -> dict[str, Any]:
    """Return fields of ``ServerArgs``."""
    return {
        "enable_priority_scheduling": True,
        "prefill_decode_interval": 1,
        "chunked_prefill_size": chunk_tokens,
    }


def search(
    measure: Callable[[Mapping[str, Any]], Candidate | None],
    chunk_tokens: Sequence[int],
    offline_tokens_per_s: float,
) -> Mapping[str, Any] | None:
    """Return the setting that counts: the best of all kinds and sizes, then of it refined.

    Args:
        measure: Given fields of ``ServerArgs``; None where the server gave no result.
        chunk_tokens: The sizes to try.
        offline_tokens_per_s: Ours: see ``best_setting``.
    """
    found: dict[str, tuple[Mapping[str, Any], Candidate]] = {}

    def attempt(settings: Mapping[str, Any]) -> None:
        if (candidate := measure(settings)) is not None:
            found[" ".join(as_flags(settings))] = (settings, candidate)

    def best() -> Mapping[str, Any]:
        candidates = {name: candidate for name, (_, candidate) in found.items()}
        return found[best_setting(candidates, offline_tokens_per_s)][0]

    for tokens in chunk_tokens:
        attempt(tuned(tokens))
        if compat.has_decode_interval():
            attempt(interleaved(tokens))
    if not found:
        return None
    for refinement in REFINEMENTS:
        attempt({**best(), **refinement})
    return best()


def best_setting(candidates: Mapping[str, Candidate], offline_tokens_per_s: float) -> str:
    """Return which setting has the best P99 TTFT with at least so many offline tokens/s.

    Where none has as many, the one with most.
    """
    enough = {name: c for name, c in candidates.items() if c[1] >= offline_tokens_per_s}
    if enough:
        return min(enough, key=lambda name: enough[name][0])
    return max(candidates, key=lambda name: candidates[name][1])
