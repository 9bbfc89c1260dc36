"""The systems that are compared at a GPU's scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from interference_bench.systems import EngineSystem
from sglang_coserve.bench_serving import stock
from sglang_coserve.metrics import SloTargets

PLAIN: Final = "plain SGLang alone"
STOCK: Final = "stock"
"""What the names of stock SGLang beside offline work begin with."""

DEFAULT: Final = "ours, default"
ALONE: Final = EngineSystem(has_offline=False)
"""Stock SGLang as it starts, with online requests alone."""

_POLICY: Final[Mapping[str, Any]] = {"offline_policy": "coserve"}


def stock_settings(chunk_tokens: Sequence[int]) -> dict[str, EngineSystem]:
    """Return the settings of stock SGLang that are tried: of decodes between chunks one size."""
    found = {
        f"{STOCK}, mixed chunks of {tokens:,}": EngineSystem(flags=stock.tuned(tokens))
        for tokens in chunk_tokens
    }
    if stock.has_decode_interval():
        tokens = max(chunk_tokens)
        name = f"{STOCK}, decodes between chunks of {tokens:,}"
        found[name] = EngineSystem(flags=stock.interleaved(tokens))
    return found


def ours(alone: SloTargets, given: SloTargets) -> dict[str, EngineSystem]:
    """Return our default, and ours with two kinds of targets.

    Args:
        alone: P99 TTFT and P99 gap to keep, from online requests alone.
        given: those that an operator would state.
    """
    stated = "ours, {:.0f} and {:.0f} ms".format(*_limits_ms(given))
    return {
        DEFAULT: EngineSystem(coserve={**_POLICY, "online_slowdown": "10%"}),
        "ours, 1.2 × alone": EngineSystem(coserve={**_POLICY, "slo": slos_of(alone)}),
        stated: EngineSystem(coserve={**_POLICY, "slo": slos_of(given)}),
    }


def of_papers(alone: SloTargets) -> dict[str, EngineSystem]:
    """Return the papers' policies with the first of these targets.

    HyGen's budget L is found by test runs (§4.2): it gets the limit of gaps, and parts of it.
    """
    slos, (_, gap_ms) = slos_of(alone), _limits_ms(alone)
    systems = {
        f"{policy}, 1.2 × alone": EngineSystem(coserve={"offline_policy": policy, "slo": slos})
        for policy in ("conserve", "ooco", "bros", "hygen")
    }
    for part in (2, 4):
        settings = {"offline_policy": "hygen", "slo": slos, "iteration_budget_ms": gap_ms / part}
        systems[f"hygen, L of 1/{part} the gap"] = EngineSystem(coserve=settings)
    return systems


def slos_of(targets: SloTargets, gaps: str = "tbt") -> tuple[str, ...]:
    """Return values of ``--slo``: of P99 TTFT and the P99 gap, as far as there are targets.

    ``gaps`` is ``tpot`` where that of a request's mean gap is meant.
    """
    limits = {"ttft": targets.ttft_s, gaps: targets.tpot_s}
    return tuple(f"{what} p99 <= {1e3 * s:.3f}ms" for what, s in limits.items() if s is not None)


def _limits_ms(targets: SloTargets) -> tuple[float, float]:
    assert targets.ttft_s is not None and targets.tpot_s is not None
    return 1e3 * targets.ttft_s, 1e3 * targets.tpot_s
