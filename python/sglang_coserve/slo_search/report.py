"""Reports a session as text, and as plain values for JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any, Final

from sglang_coserve import __version__
from sglang_coserve.core.control.slo import SloResult, format_slo
from sglang_coserve.simulator.report import aligned
from sglang_coserve.simulator.result import LABEL
from sglang_coserve.slo_search.measurement import Trial
from sglang_coserve.slo_search.session import SearchSession
from sglang_coserve.slo_search.validation import ValidationRun

__all__ = ["report_text", "report_to_dict"]

_MEASURED: Final = "measured"


def report_text(session: SearchSession) -> str:
    """Return the tables of all runs, the result, and the command line to serve with."""
    return "".join(f"{line}\n" for line in _lines(session))


def report_to_dict(session: SearchSession) -> dict[str, Any]:
    """Return the whole session for JSON, with times in milliseconds."""
    search, validation, profile = session.search, session.validation, session.profile
    return {
        "budget_ms": _ms(session.budget_s),
        "is_validated": validation is not None and validation.budget_s is not None,
        "problem": session.problem,
        "serve": _command(session),
        "settings": session.options.to_dict(),
        "engine": None if session.machine is None else session.machine.to_dict(),
        "profile": {
            "model": profile.model,
            "hardware": profile.hardware,
            "tp_size": profile.tp_size,
            "kind": profile.latency_model.kind,
            "sglang_version": profile.sglang_version,
        },
        "version": __version__,
        LABEL: None
        if search is None
        else {
            "budget_ms": _ms(search.budget_s),
            "is_limit": search.is_limit,
            "online_only": _trial_or_none(search.online_only),
            "runs": [_trial_to_dict(trial) for trial in search.trials],
        },
        _MEASURED: {
            "online_only": _trial_or_none(session.measured_alone),
            "runs": [
                {
                    _MEASURED: _trial_to_dict(run.measured),
                    f"{LABEL}_same_load": _trial_to_dict(run.simulated),
                }
                for run in (validation.runs if validation else ())
            ],
        },
    }


def _lines(session: SearchSession) -> Iterator[str]:
    profile, search = session.profile, session.search
    yield f"{profile.model} on {profile.hardware}, tp {profile.tp_size}"
    if session.machine is not None:
        yield f"engine: {session.machine}; policy {session.options.policy}"
    if search is not None and search.online_only is not None:
        yield f"({LABEL}) {search.load}"
        runs = [(f"run {number}", trial) for number, trial in enumerate(search.trials, start=1)]
        yield from _table([("online only", search.online_only), *runs])
    if session.measured_alone is not None:
        yield f"({_MEASURED}, and {LABEL} for the same requests)"
        yield from _table(list(_measured_rows(session, session.measured_alone)))
        for number, run in enumerate(session.validation.runs if session.validation else (), 1):
            yield f"run {number}, {_MEASURED} / {LABEL}: {_ratios(run)}"
    yield _verdict(session)
    if command := _command(session):
        yield f"  {command}"


def _measured_rows(session: SearchSession, alone: Trial) -> Iterator[tuple[str, Trial]]:
    yield f"online only, {_MEASURED}", alone
    if session.validation is not None:
        yield f"online only, {LABEL}", session.validation.simulated_alone
        for number, run in enumerate(session.validation.runs, start=1):
            yield f"run {number}, {_MEASURED}", run.measured
            yield f"run {number}, {LABEL}", run.simulated


def _verdict(session: SearchSession) -> str:
    search, validation = session.search, session.validation
    if session.problem is not None:
        return f"no budget: {session.problem}"
    if search is None or search.budget_s is None:
        return "no budget: the search ended early"
    simulated = f"{search.budget_s * 1e3:.4g} ms {LABEL}"
    if search.is_limit:
        simulated += ", the largest tried: the scheduler meets the SLOs without it"
    if session.options.validation is None:
        return f"budget: {simulated}; serve with"
    if validation is None or validation.budget_s is None:
        return f"no validated budget: the validation ended early ({simulated})"
    return (
        f"budget: {validation.budget_s * 1e3:.4g} ms, validated in {validation.seconds:g} s on "
        f"this machine ({simulated}); serve with"
    )


def _command(session: SearchSession) -> str | None:
    flags = session.server_flags
    return None if flags is None else shlex.join(["coserve", "serve", *flags])


def _table(rows: Sequence[tuple[str, Trial]]) -> list[str]:
    slos = [format_slo(result.slo) for result in rows[0][1].results]
    head = ("", "budget ms", *slos, "met", "offline tok/s")
    return aligned([head, *(_cells(name, trial) for name, trial in rows)])


def _cells(name: str, trial: Trial) -> tuple[str, ...]:
    measurement = trial.measurement
    return (
        name,
        "-" if trial.budget_s is None else f"{trial.budget_s * 1e3:.2f}",
        *map(_result_text, trial.results),
        "yes" if trial.is_met else "no",
        f"{measurement.offline_tokens_per_s:,.0f}"
        + (" (ran out)" if measurement.offline_ran_out else ""),
    )


def _result_text(result: SloResult) -> str:
    if result.measured_s is None:
        return "-"
    comparison = "<=" if result.is_met else ">"
    return f"{result.measured_s * 1e3:.1f} {comparison} {result.limit_s * 1e3:.1f} ms"


def _ratios(run: ValidationRun) -> str:
    parts = [
        f"{real.slo.latency.value} {real.slo.statistic.value} "
        + _ratio(real.measured_s, expected.measured_s)
        for real, expected in zip(run.measured.results, run.simulated.results, strict=True)
    ]
    rates = (trial.measurement.offline_tokens_per_s for trial in (run.measured, run.simulated))
    return ", ".join([*parts, f"offline tok/s {_ratio(*rates)}"])


def _ratio(measured: float | None, simulated: float | None) -> str:
    return f"{measured / simulated:.2f}" if measured is not None and simulated else "-"


def _trial_or_none(trial: Trial | None) -> dict[str, Any] | None:
    return None if trial is None else _trial_to_dict(trial)


def _trial_to_dict(trial: Trial) -> dict[str, Any]:
    measurement = trial.measurement
    return {
        "budget_ms": _ms(trial.budget_s),
        "is_met": trial.is_met,
        "slos": [
            {
                "slo": format_slo(result.slo),
                "limit_ms": _ms(result.limit_s),
                "value_ms": _ms(result.measured_s),
                "is_met": result.is_met,
            }
            for result in trial.results
        ],
        "offline_tokens_per_s": measurement.offline_tokens_per_s,
        "offline_ran_out": measurement.offline_ran_out,
        "online": measurement.latency.to_dict(),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
