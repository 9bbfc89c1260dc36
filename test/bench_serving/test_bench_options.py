"""What ``python -m sglang_coserve.bench_serving`` is told, and what it makes of figures."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from sglang_coserve import __version__
from sglang_coserve.bench_serving import stock
from sglang_coserve.bench_serving.__main__ import main
from sglang_coserve.bench_serving.compare import Comparison, Plan, Repeat, Run, folder_name, table
from sglang_coserve.bench_serving.load import LoadProcess, with_body
from sglang_coserve.bench_serving.one_run import Figures
from sglang_coserve.bench_serving.options import Options, parse_options
from sglang_coserve.demo.servers import module_of
from sglang_coserve.errors import ConfigError, ServerError, StartupError
from sglang_coserve.local_server import ChildServer
from sglang_coserve.metrics import SloTargets
from sglang_coserve.srt import compat

LOADS = ["--online", "--request-rate", "4", "--offline", "--max-concurrency", "8"]
MODEL = ["--model-path", "m"]


def parse(*words: str) -> Options:
    return parse_options([*MODEL, *words, *LOADS])


def test_each_section_goes_to_its_own_program() -> None:
    options = parse("--out", "o", "--server", "--tp", "2", "--port-not-ours")
    assert options.server == ("--tp", "2", "--port-not-ours")
    assert options.online == ("--request-rate", "4")
    assert options.offline == ("--max-concurrency", "8")
    assert [system.name for system in options.systems] == ["alone", "stock-tuned", "coserve"]


def test_systems_are_known_ones_with_more_flags_and_alone_is_first() -> None:
    options = parse("--systems", "coserve,stock", "coserve --offline-policy hygen", "alone")
    alone, ours, plain, hygen = options.systems
    assert (alone.name, alone.has_offline) == ("alone", False)
    assert (ours.name, ours.flags) == ("coserve", ())
    assert not plain.is_ours and plain.offline_body == {}
    assert hygen.flags == ("--offline-policy", "hygen")
    assert hygen.offline_body == {"service_tier": "flex"}


def test_a_label_is_the_name_in_the_results() -> None:
    alone, ours = parse("--systems", "coserve:wide --online-slowdown 50%", "alone").systems
    assert (alone.name, ours.name) == ("alone", "coserve:wide")
    assert ours.is_ours and ours.flags == ("--online-slowdown", "50%")


def test_a_system_is_told_its_targets_in_milliseconds() -> None:
    (system,) = parse("--systems", "coserve-slo", "--slo-tpot-ms", "50").systems
    assert system.server_flags(SloTargets(0.3, 0.05)) == (
        *("--slo-ttft-ms", "300.000", "--slo-tpot-ms", "50.000"),
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*MODEL, "--systems", "vllm", *LOADS], "'vllm': known are alone, stock"),
        ([*MODEL, "--systems", "coserve 'x", *LOADS], "No closing quotation"),
        ([*MODEL, "--systems", "coserve: --tp 2", *LOADS], "give a label after the colon"),
        ([*MODEL, "--systems", "stock:a --tp 2", "stock:a", *LOADS], "'stock:a': two systems"),
        ([*MODEL, "--offline", "--seed", "1"], "add --online"),
        ([*MODEL, "--online", "--seed", "1"], "add --offline"),
        (LOADS, "either --model-path, to start servers, or --base-url"),
        ([*MODEL, *LOADS, "--base-url", "http://x"], "--offline … --base-url: this program sets"),
        ([*MODEL, *LOADS, "--output-file=x"], "--offline … --output-file=x"),
        ([*MODEL, *LOADS, "--base", "http://x"], "--offline … --base: this program sets"),
        ([*MODEL, "--systems", "coserve-slo", *LOADS], "needs --slo-ttft-ms"),
        ([*MODEL, "--systems", "coserve", "--slo-scale", "1.2", *LOADS], "from 'alone'"),
        ([*MODEL, "--slo-scale", "0", *LOADS], "--slo-scale 0: it must be a positive number"),
        ([*MODEL, "--warmup-s", "nan", *LOADS], "--warmup-s nan"),
        ([*MODEL, "--chunk-tokens", "0", *LOADS], "--chunk-tokens 0"),
        ([*MODEL, "--repeats", "0", *LOADS], "--repeats 0: it must be a positive number"),
        ([*MODEL, "--steady-state-concurrency-ratio", "2", *LOADS], "at most 1"),
        (["--base-url", "stock-tuned=http://x", *LOADS], "stock-tuned=http://x"),
        (["--base-url", "alone=x", *LOADS], "NAME=]http://"),
        (["--base-url", "http://x", "http://y", *LOADS], "given once"),
        (["--base-url", "http://x", "--systems", "alone", *LOADS], "NAME=URL instead"),
    ],
)
def test_what_cannot_be_run_is_said(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_options(words)
    assert said in str(error.value)


def test_servers_that_run_already_are_systems_too() -> None:
    options = parse_options(["--base-url", "http://a:1/", "alone=http://b:2", *LOADS])
    assert [system.name for system in options.systems] == ["alone", "coserve"]
    assert options.urls == {"alone": "http://b:2", "coserve": "http://a:1"}


def test_systems_with_many_flags_have_folders_of_their_own() -> None:
    names = ["stock " + "--flag " * 50 + end for end in ("a", "b")] + ["stock a/b", "stock a_b"]
    assert len({folder_name(name) for name in names}) == len(names)
    assert all(len(folder_name(name)) < 200 for name in names)
    assert folder_name("coserve-slo") == "coserve-slo"


def test_the_mark_joins_the_body_that_is_given() -> None:
    flags = ["--seed", "1", "--extra-request-body", '{"top_k": 5}']
    *kept, name, body = with_body(flags, {"service_tier": "flex"})
    assert (kept, name) == (["--seed", "1"], "--extra-request-body")
    assert json.loads(body) == {"top_k": 5, "service_tier": "flex"}
    assert with_body(["--seed", "1"], {}) == ["--seed", "1"]
    assert with_body([f"{name}={flags[-1]}", "--seed", "1"], {"a": 1}) == [
        *("--seed", "1", name, '{"top_k": 5, "a": 1}')
    ]


def test_a_load_without_any_token_says_why(tmp_path: Path) -> None:
    load = LoadProcess.__new__(LoadProcess)
    load._name, load._process = "online", subprocess.Popen(["true"])
    load._report, load._events = tmp_path / "online.jsonl", tmp_path / "events.jsonl"
    load._report.write_text('{"completed": 0}\n')
    failed = {"is_ok": False, "start_s": 1.0, "ttft_s": 0.0, "itls_s": [], "prompt_tokens": 5}
    failed |= {"output_tokens": 0, "error": "Unauthorized"}
    measured = {"event": "measured", "requests": [failed] * 2, "unsent": 0, "steady_state": None}
    load._events.write_text(json.dumps(measured) + "\n")
    with pytest.raises(ServerError, match="no request of the online load got a token: Unauth"):
        load.result(60.0)


def test_where_nothing_can_be_written_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", "/dev/null/x", "--systems", "stock", *MODEL, *LOADS]) == 2
    assert "/dev/null/x" in (told := capsys.readouterr().err)
    assert "name a path of directories" in told and "Traceback" not in told


@pytest.mark.parametrize("given", ['{"priority": 3}', "{", "[]", ""])
def test_a_body_that_contradicts_the_mark_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--extra-request-body"):
        with_body(["--extra-request-body", given], {"priority": 0})


def test_the_search_refines_the_setting_with_the_best_p99_at_our_tokens() -> None:
    """Small chunks are fast for online requests and slow offline; ``lof`` helps, the other not."""
    tried: list[Mapping[str, Any]] = []

    def measure(settings: Mapping[str, Any]) -> stock.Candidate | None:
        tried.append(settings)
        tokens = settings["chunked_prefill_size"]
        if tokens == 512:
            return None  # Its server does not start.
        slower = 1.5 if "prefill_decode_interval" in settings else 1.0
        slower *= 2 if "retraction_policy" in settings else 1
        slower *= 0.5 if "schedule_policy" in settings else 1
        return tokens * slower, tokens * 10.0

    best = stock.search(measure, [128, 256, 512, 1024], offline_tokens_per_s=2000)
    assert best == {**stock.tuned(256), "schedule_policy": "lof"}
    assert len(tried) == (8 if compat.has_decode_interval() else 4) + 2
    assert stock.search(lambda _: None, [128], 0.0) is None


@pytest.mark.parametrize("has_interval", [False, True])
def test_decodes_between_chunks_are_tried_where_sglang_can_have_them(
    monkeypatch: pytest.MonkeyPatch, has_interval: bool
) -> None:
    monkeypatch.setattr(compat, "has_decode_interval", lambda: has_interval)
    kinds: list[bool] = []

    def measure(settings: Mapping[str, Any]) -> stock.Candidate:
        kinds.append("prefill_decode_interval" in settings)
        return 1.0, 1.0

    stock.search(measure, [256], 0.0)
    if has_interval:
        assert kinds[:2] == [False, True]
    else:
        assert not any(kinds)


def test_of_the_settings_tried_the_best_ttft_at_as_many_offline_tokens_counts() -> None:
    tried = {"small": (100.0, 50.0), "middle": (200.0, 90.0), "large": (400.0, 120.0)}
    assert stock.best_setting(tried, 80.0) == "middle"
    assert stock.best_setting(tried, 0.0) == "small"
    assert stock.best_setting(tried, 500.0) == "large"


def run(
    name: str,
    p99_ttft_ms: float,
    offline: float | None = None,
    backend: str | None = "fa3",
    **more: Any,
) -> Run:
    figures = Figures(
        median_ttft_ms=p99_ttft_ms / 2,
        p99_ttft_ms=p99_ttft_ms,
        p99_itl_ms=20.0,
        mean_tpot_ms=10.0,
        slo_attainment=None,
        request_goodput=None,
        online_failed=1,
        offline_tokens_per_s=offline,
    )
    plan = Plan(name, ["python"], {}, [], [], 0.0, {})
    backends = {"attention_backend": backend, "prefill_attention_backend": None}
    reports = {"online": {"backends": backends}}
    return Run([Repeat(plan, replace(figures, **more), reports)])


def table_of(comparison: Comparison) -> tuple[dict[str, dict[str, str]], str]:
    """The cells by system and column, of columns with one name the last one; what is said below."""
    head, _, *lines = table(comparison).splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("|")]
    columns = [cell.strip() for cell in head.split("|")]
    cells = {row[1]: dict(zip(columns, row, strict=True)) for row in rows}
    return cells, "\n".join(line for line in lines if not line.startswith("|"))


def test_the_table_divides_by_alone_and_by_the_best_stock_setting() -> None:
    comparison = Comparison(parse(), lambda _: None)
    fast = run("stock-tuned --chunked-prefill-size 256", 150.0, 800.0)
    comparison.tried = {
        fast.plan.system: fast,
        "stock-tuned big": run("stock-tuned big", 300.0, 1000.0),
    }
    comparison.runs = {
        "alone": run("alone", 100.0),
        "stock-tuned": fast,
        "coserve": run("coserve", 110.0, 900.0, offline_failed=2, offline_ran_out=True),
    }
    cells, said = table_of(comparison)
    assert cells["alone"]["offline tokens/s"] == cells["alone"]["in SLO"] == "–"
    ours = cells["coserve *"]
    assert ours["P99 TTFT ms"] == "110.0" and "| 1.10 |" in " ".join(table(comparison).split())
    assert ours["÷ best stock"] == "0.90" and cells["stock-tuned"]["÷ best stock"] == "0.80"
    assert ours["failed"] == "3"
    assert "stock-tuned: --chunked-prefill-size 256, the best of 2 settings" in said
    assert "ended before the online one (coserve)" in said
    assert "SGLang's attention backend in effect: fa3." in said


def test_attention_backends_that_differ_are_told_by_system() -> None:
    comparison = Comparison(parse(), lambda _: None)
    comparison.runs = {
        "alone": run("alone", 100.0),
        "stock": run("stock", 100.0, 900.0, "flashinfer"),
        "coserve": run("coserve", 100.0, 900.0, None),
    }
    _, said = table_of(comparison)
    assert "fa3 (alone), flashinfer (stock), unknown (coserve)" in said


@pytest.mark.parametrize("sglang", [version("sglang"), "0.1"])
def test_what_another_version_measured_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sglang: str
) -> None:
    def start(*_: object, **__: object) -> None:
        raise StartupError("started")

    monkeypatch.setattr(ChildServer, "start_process", start)
    flags = ["--model-path", "m"]
    plan = Plan(
        system="stock",
        command=["python", "-m", module_of(flags, is_ours=False), *flags],
        targets_ms={"ttft": None, "tpot": None},
        online=LOADS[1:3],
        offline=LOADS[4:],
        warmup_s=5.0,
        versions={"sglang_coserve": __version__, "sglang": sglang},
    )
    earlier = Repeat(plan, run("stock", 100.0, 900.0).figures, {})
    folder = tmp_path / "runs" / "stock" / "1"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(asdict(earlier)))
    comparison = Comparison(parse("--systems", "stock", "--out", str(tmp_path)), lambda _: None)
    comparison.run()
    is_other = sglang == "0.1"
    assert comparison.failed == ({"stock": "started"} if is_other else {})
    assert ("stock" in comparison.runs) is not is_other


def test_of_repeats_the_table_has_medians_and_ranges_of_pairs() -> None:
    def repeated(name: str, p99s_ms: list[float], offline: list[float | None]) -> Run:
        runs = [run(name, p99_ms, rate) for p99_ms, rate in zip(p99s_ms, offline, strict=True)]
        return Run([one for each in runs for one in each.repeats])

    comparison = Comparison(parse("--repeats", "3"), lambda _: None)
    comparison.runs = {
        "alone": repeated("alone", [100.0, 200.0, 400.0], [None] * 3),
        "coserve": repeated("coserve", [150.0, 240.0, 400.0], [900.0, 700.0, 800.0]),
    }
    cells, said = table_of(comparison)
    ours = cells["coserve"]
    assert ours["P99 TTFT ms"] == "240.0 (150.0–400.0)"
    assert "1.20 (1.00–1.50)" in table(comparison)
    assert ours["offline tokens/s"] == "800 (700–900)"
    assert ours["failed"] == "3"
    assert "Medians of 3 repeats" in said
    figures = comparison.runs["coserve"].figures
    assert (figures.p99_ttft_ms, figures.offline_tokens_per_s) == (240.0, 800.0)
