"""The budget search: what it finds, what it says when there is nothing to find, and validation."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import pytest

from sglang_coserve.config import CoserveConfig
from sglang_coserve.core.control.slo import SloCheck, parse_slo
from sglang_coserve.core.latency_model import CONSERVE, LatencyModel, LinearModel
from sglang_coserve.errors import CoserveError, InfeasibleError
from sglang_coserve.slo_search.load import SearchLoad
from sglang_coserve.slo_search.machine import EngineMachine
from sglang_coserve.slo_search.measurement import SearchRun, Trial
from sglang_coserve.slo_search.offline_file import offline_file
from sglang_coserve.slo_search.options import SearchOptions
from sglang_coserve.slo_search.progress import SearchProgress
from sglang_coserve.slo_search.search import BudgetSearch
from sglang_coserve.slo_search.server_flags import budget_flags, slo_flags
from sglang_coserve.slo_search.simulated import SimulatedBench
from sglang_coserve.slo_search.validation import Validation
from sglang_coserve.workload import fit_to_context, poisson_arrivals, synthesize, window

MODEL = LinearModel.of(CONSERVE, compute_token_s=1e-4, context_token_s=1e-7, iteration_s=5e-3)
"""5 ms and a tenth of one for each token."""

SECONDS = 20.0
QUIET = SearchProgress(show=False)


def bench(
    policy: str = "coserve",
    *,
    rate_per_s: float = 2.0,
    prompt_tokens: int = 200,
    model: LatencyModel = MODEL,
    offline: str = "512x32",
) -> SimulatedBench:
    arrivals = synthesize(poisson_arrivals(rate_per_s, seed=1), repeat((prompt_tokens, 30)))
    online, cut = fit_to_context(window(arrivals, 0.0, SECONDS), 4096)
    load = SearchLoad(online, offline, 32, SECONDS, 4096, cut)
    machine = EngineMachine(kv_capacity_tokens=30_000, max_batch_tokens=2048)
    return SimulatedBench(model, machine, load, policy, QUIET)


def search(where: SimulatedBench, *slos: str) -> BudgetSearch:
    return BudgetSearch(where, [parse_slo(slo) for slo in slos])


def trial_under(where: SimulatedBench, budget_s: float, *slos: str) -> Trial:
    check = SloCheck(tuple(map(parse_slo, slos)), where.online_only().latency)
    return Trial.of(budget_s, where.under_budget(budget_s, check), check)


def test_the_budget_is_the_largest_that_meets_every_slo() -> None:
    where, slos = bench("hygen"), ("ttft p99 <= 400ms", "tpot mean <= +100%")
    found = search(where, *slos)
    budget_s = found.run()
    assert trial_under(where, budget_s, *slos).is_met
    assert not trial_under(where, budget_s * 1.1, *slos).is_met
    met = [trial for trial in found.trials if trial.is_met]
    assert budget_s == max(trial.budget_s or 0.0 for trial in met)
    assert not found.is_limit
    # Twice as long as online alone needs: what the tolerance says, less the reserve.
    assert found.online_only is not None
    tpot_alone_s = found.online_only.measurement.latency.tpot.mean_s
    assert tpot_alone_s is not None
    assert budget_s == pytest.approx(2 * tpot_alone_s, rel=0.25)


def test_a_looser_slo_gives_more_offline_tokens() -> None:
    rates = []
    for slo in ("tpot mean <= +20%", "tpot mean <= +60%", "tpot mean <= +200%"):
        found = search(bench("hygen"), slo)
        budget_s = found.run()
        (best,) = (trial for trial in found.trials if trial.budget_s == budget_s)
        rates.append(best.measurement.offline_tokens_per_s)
    assert 0 < rates[0] < rates[1] < rates[2]


def test_a_budget_in_the_middle_of_the_range_is_found() -> None:
    # A small budget cuts online prompts into many chunks, so that first tokens are late; a large
    # one makes decodes late.
    where, slos = bench("hygen", prompt_tokens=2000), ("ttft p50 <= 460ms", "tpot mean <= 45ms")
    found = search(where, *slos)
    budget_s = found.run()
    ttft, tpot = trial_under(where, found.least_budget_s, *slos).results
    assert tpot.is_met and not ttft.is_met
    assert trial_under(where, budget_s, *slos).is_met


def test_slos_that_the_deadlines_alone_keep_end_the_search_at_once() -> None:
    found = search(bench(), "tpot mean <= 80ms")
    assert found.run() == pytest.approx(0.16)
    assert found.is_limit
    assert len(found.trials) == 1


def test_what_not_even_online_requests_alone_meet() -> None:
    where = bench("hygen")
    found = search(where, "ttft p99 <= 10ms", "tpot mean <= 500ms")
    with pytest.raises(InfeasibleError, match="not even online requests alone") as problem:
        found.run()
    assert found.budget_s is None
    assert found.online_only is not None and not found.online_only.is_met
    (nearest,) = str(problem.value).split("run kept: '")[1].split("'")[:1]
    assert nearest.startswith("ttft p99 <= ")
    # What is proposed can be had.
    assert search(where, nearest, "tpot mean <= 500ms").run() > 0


def test_what_only_offline_work_makes_impossible() -> None:
    found = search(bench("hygen"), "ttft p99 <= +0.1%")
    with pytest.raises(InfeasibleError, match="online requests alone meet them: ttft p99"):
        found.run()
    assert found.online_only is not None and found.online_only.is_met


def test_the_same_seed_gives_the_same_search() -> None:
    runs = []
    for _ in range(2):
        found = search(bench("hygen"), "tbt p99 <= +80%")
        found.run()
        runs.append(found.trials)
    assert runs[0] == runs[1]


def test_offline_requests_that_run_out_are_noted(tmp_path: Path) -> None:
    lines = tmp_path / "few.jsonl"
    body = {"model": "default", "prompt": "The old mill", "max_tokens": 8}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    lines.write_text("".join(json.dumps(line | {"custom_id": str(i)}) + "\n" for i in range(3)))
    slo = "tpot mean <= +100%"
    assert trial_under(bench(offline=str(lines)), 0.1, slo).measurement.offline_ran_out
    assert not trial_under(bench(), 0.1, slo).measurement.offline_ran_out


def test_the_server_takes_the_flags_and_means_the_same() -> None:
    alone = bench().online_only().latency
    check = SloCheck((parse_slo("ttft p99 <= 300ms"), parse_slo("tpot mean <= +50%")), alone)
    parser = argparse.ArgumentParser()
    CoserveConfig.add_cli_args(parser)
    args = parser.parse_args([*slo_flags(check), *budget_flags(0.012345)])
    config = CoserveConfig.from_mapping(vars(args))
    assert config.iteration_budget_ms == pytest.approx(12.345, rel=1e-3)
    limits_s = [slo.limit_s for slo in config.slos()]
    assert limits_s == pytest.approx([result.limit_s for result in check.results(alone)], rel=1e-3)


def test_the_server_gets_the_lengths_that_were_simulated(tmp_path: Path) -> None:
    load = bench(offline="40x7").load
    path = offline_file(load, tmp_path / "lines.jsonl", num_lines=5, vocab_size=100)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == 5
    prompts = [line["body"]["prompt"] for line in lines]
    assert all(len(prompt) == 40 and set(prompt) <= set(range(100)) for prompt in prompts)
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 5
    assert all(line["body"]["max_tokens"] == 7 for line in lines)
    # A batch file is the user's, as it is.
    assert (
        offline_file(replace(load, offline=str(path)), tmp_path / "x", num_lines=1, vocab_size=100)
        == path
    )


class ModelledServer:
    """In place of ``LiveBench``: what it measures is simulated. The real one has its own test."""

    def __init__(self, logs: Path, bench: SimulatedBench, check: SloCheck) -> None:
        self.logs = logs
        self.progress = QUIET
        self.vocab_size = 1000
        self._bench = bench
        self._check = check
        self._budget_s = 0.0

    @contextmanager
    def serving(self, _name: str, *flags: str) -> Iterator[str]:
        self._budget_s = float(flags[flags.index("--iteration-budget-ms") + 1]) / 1e3
        yield "http://nowhere"

    def measure(self, _name: str, _url: str, _load: SearchLoad, _lines: Path | None) -> SearchRun:
        return self._bench.under_budget(self._budget_s, self._check)


def validation(tmp_path: Path, *slos: str) -> Validation:
    where = bench("hygen")
    check = SloCheck(tuple(map(parse_slo, slos)), where.online_only().latency)
    server = ModelledServer(tmp_path, where, check)
    return Validation(server, where, check, flags=())  # type: ignore[arg-type]


def test_a_budget_that_holds_on_the_engine_is_left_alone(tmp_path: Path) -> None:
    validated = validation(tmp_path, "tpot mean <= +100%")
    assert validated.run(0.008, 0.006, 4) == validated.budget_s == 0.008
    (run,) = validated.runs
    assert run.measured.is_met and run.simulated.is_met


def test_a_budget_that_misses_on_the_engine_is_lowered_by_the_ratio(tmp_path: Path) -> None:
    validated = validation(tmp_path, "tpot mean <= +50%")
    budget_s = validated.run(0.02, 0.006, 4)
    first, *_, last = validated.runs
    assert budget_s == last.measured.budget_s == validated.budget_s
    assert last.measured.is_met and not first.measured.is_met
    budgets_s = [run.measured.budget_s or 0.0 for run in validated.runs]
    assert budgets_s == sorted(budgets_s, reverse=True)
    limit_s = first.measured.results[0].limit_s
    assert budgets_s[1] == pytest.approx(min(0.02 / (1 + first.measured.excess), limit_s))


def test_validation_ends_with_the_nearest_slo(tmp_path: Path) -> None:
    validated = validation(tmp_path, "tpot mean <= +1%")
    with pytest.raises(InfeasibleError, match=r"none of 1 real runs.*tpot mean <= [\d.]+ms'"):
        validated.run(0.05, 0.001, 1)
    assert validated.budget_s is None
    assert len(validated.runs) == 1


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("policy", "conserve", "only coserve and hygen"),
        ("offline", "none", "no budget is needed"),
        ("duration", -1.0, "--duration -1"),
        ("slo", (), "any budget would do"),
        ("slo", ("ttft p98 <= 3s",), "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_named(field: str, value: object, problem: str) -> None:
    good = SearchOptions(Path("profile.json"), ("ttft p99 <= 1s",))
    with pytest.raises(CoserveError, match=problem):
        replace(good, **{field: value})
