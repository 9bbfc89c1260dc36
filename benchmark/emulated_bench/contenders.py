"""The systems that are compared at a GPU's scale, in groups that can be run one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from interference_bench.systems import EngineSystem
from sglang_coserve.bench_serving import stock
from sglang_coserve.metrics import SloTargets
from sglang_coserve.srt import compat

PLAIN: Final = "plain SGLang alone"
"""Name of stock SGLang as it starts, with online requests alone."""

STOCK: Final = "stock"
"""First word of the names of stock SGLang beside offline work."""

MIXED: Final = f"{STOCK}, mixed chunks"
"""First words of the names of stock SGLang with decodes in each chunk."""

OURS: Final = "ours"
"""First word of the names of our policy."""

DEFAULT: Final = f"{OURS}, default"
OF_ALONE: Final = "1.2 × alone"
"""Name of the pair of targets that the same online requests alone give."""

ALONE_FACTOR: Final = 1.2
PAIRS_MS: Final = ((500, 30), (500, 50), (250, 50), (1000, 100))
"""Targets of P99 TTFT and of P99 TPOT, the mean gap of a request; 500 and 30 ms are the interactive
pair of MLPerf Inference for an 8B model."""

PACES_MS: Final = (25, 40)
"""Targets of the P99 gap, beside the default for first tokens."""

FRONTIER_PACES_MS: Final = (15,)
FRONTIER_SLOWDOWNS: Final = ("25%", "50%", "200%")
"""Slowdowns of streams, for the picture; the default is 100%."""

CHUNK_TOKENS: Final = (256, 512, 1024, 2048)
GROUPS: Final = ("default", "pace", "targets", "stock", "frontier", "papers")
USUAL_GROUPS: Final = GROUPS[:4]


@dataclass(frozen=True, slots=True)
class Contender:
    """A system, for an engine as well as for the simulator."""

    name: str
    group: str
    policy: str | None = None
    """Name of our policy; None for stock SGLang."""

    slo: tuple[str, ...] = ()
    """Values of ``--slo``."""

    stream_slowdown: str | None = None
    takes_alone: bool = False
    """True: the targets are ``OF_ALONE``."""

    budget_share: float | None = None
    """``--iteration-budget-ms`` as a share of the TPOT target; None: no budget."""

    chunk_tokens: int | None = None
    """``--chunked-prefill-size`` of stock SGLang; None: as it starts."""

    has_decodes_between: bool = False
    """True: stock SGLang runs decodes between chunks. False: decodes and chunks share steps."""

    def engine(self, of_alone: SloTargets) -> EngineSystem:
        """Return settings of the engine; ``of_alone`` are the targets of ``OF_ALONE``."""
        if self.name == PLAIN:
            return EngineSystem(has_offline=False)
        if self.policy is None:
            assert self.chunk_tokens is not None
            kind = stock.interleaved if self.has_decodes_between else stock.tuned
            return EngineSystem(flags=kind(self.chunk_tokens))
        settings: dict[str, Any] = {"offline_policy": self.policy}
        if slo := self.slos(of_alone):
            settings["slo"] = slo
        if self.stream_slowdown is not None:
            settings["stream_slowdown"] = self.stream_slowdown
        if self.budget_share is not None:
            assert of_alone.tpot_s is not None
            settings["iteration_budget_ms"] = 1e3 * self.budget_share * of_alone.tpot_s
        return EngineSystem(coserve=settings)

    def slos(self, of_alone: SloTargets) -> tuple[str, ...]:
        """Return the values of ``--slo``; ``of_alone`` are the targets of ``OF_ALONE``."""
        return slos_of(of_alone, "tpot") if self.takes_alone else self.slo


ALONE: Final = Contender(PLAIN, "alone")


def contenders(groups: Sequence[str], chunk_tokens: Sequence[int]) -> dict[str, Contender]:
    """Return the systems of some groups by name, and online requests alone as the first.

    Args:
        groups: Some of ``GROUPS``.
        chunk_tokens: Sizes of stock SGLang's chunks; decodes between chunks get the largest.
    """
    known = [ALONE, *_ours(), *_stock(chunk_tokens), *_of_papers()]
    return {one.name: one for one in known if one.group in ("alone", *groups)}


def pair_name(ttft_ms: float, tpot_ms: float) -> str:
    """Return the name of a pair of targets."""
    return f"{ttft_ms:,.0f} and {tpot_ms:.0f} ms"


def pairs(of_alone: SloTargets) -> dict[str, SloTargets]:
    """Return all pairs of targets by name; ``of_alone`` are the targets of ``OF_ALONE``."""
    absolute = {pair_name(*pair): SloTargets.of_ms(*pair) for pair in PAIRS_MS}
    return {**absolute, OF_ALONE: of_alone}


def slos_of(targets: SloTargets, gaps: str = "tbt") -> tuple[str, ...]:
    """Return values of ``--slo`` for P99s, of the latencies that have a target.

    Args:
        targets: Of first tokens and of gaps.
        gaps: ``tbt`` for the P99 of all gaps, ``tpot`` for the P99 of the requests' mean gaps.
    """
    limits = {"ttft": targets.ttft_s, gaps: targets.tpot_s}
    return tuple(f"{what} p99 <= {1e3 * s:.3f}ms" for what, s in limits.items() if s is not None)


def _ours() -> Iterator[Contender]:
    yield Contender(DEFAULT, "default", "coserve")
    for pace_ms in (*PACES_MS, *FRONTIER_PACES_MS):
        group = "pace" if pace_ms in PACES_MS else "frontier"
        name = f"{OURS}, gaps of {pace_ms} ms"
        yield Contender(name, group, "coserve", slo=(f"tbt p99 <= {pace_ms}ms",))
    for pair in PAIRS_MS:
        name = f"{OURS}, {pair_name(*pair)}"
        slo = slos_of(SloTargets.of_ms(*pair), "tpot")
        yield Contender(name, "targets", "coserve", slo=slo)
    yield Contender(f"{OURS}, {OF_ALONE}", "targets", "coserve", takes_alone=True)
    for slowdown in FRONTIER_SLOWDOWNS:
        name = f"{OURS}, streams +{slowdown}"
        yield Contender(name, "frontier", "coserve", stream_slowdown=slowdown)


def _stock(chunk_tokens: Sequence[int]) -> Iterator[Contender]:
    for tokens in chunk_tokens:
        name = f"{MIXED} of {tokens:,}"
        yield Contender(name, "stock", chunk_tokens=tokens)
    if compat.has_decode_interval():
        tokens = max(chunk_tokens)
        name = f"{STOCK}, decodes between chunks of {tokens:,}"
        yield Contender(name, "stock", chunk_tokens=tokens, has_decodes_between=True)


def _of_papers() -> Iterator[Contender]:
    """Yield the papers' policies; HyGen's budget is searched by test runs (its section 4.2)."""
    for policy in ("conserve", "ooco", "bros", "hygen"):
        yield Contender(f"{policy}, {OF_ALONE}", "papers", policy, takes_alone=True)
    for part in (2, 4):
        name = f"hygen, budget of 1/{part} the TPOT"
        yield Contender(name, "papers", "hygen", takes_alone=True, budget_share=1 / part)


def targets_of_alone(row: Mapping[str, Any]) -> SloTargets:
    """Return the targets of ``OF_ALONE`` from the figures of online requests alone."""
    p99s_ms = (row["ttft_p99_ms"], row["tpot_p99_ms"])
    return SloTargets(*(1e-3 * ALONE_FACTOR * p99_ms for p99_ms in p99s_ms))
