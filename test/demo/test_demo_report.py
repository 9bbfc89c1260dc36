"""What the demo says of what it measured: also where it is not in our favour."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from matplotlib import rc_context
from rich.console import Console

from sglang_coserve import errors
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.demo.cpu_use import CpuTimes, CpuUse
from sglang_coserve.demo.loads import LoadScale, StreamedRequest, repeated
from sglang_coserve.demo.result import DemoResult, SystemResult, as_json
from sglang_coserve.demo.run import DemoOptions, run_demo
from sglang_coserve.demo.table import as_table, cpu_lines
from sglang_coserve.demo.timeline import draw
from sglang_coserve.demo.verdict import sentence
from sglang_coserve.errors import InputFileError, MissingExtraError
from sglang_coserve.metrics import Outcome, RequestTimeline, SloTargets
from sglang_coserve.srt.emulation.model_directory import CONTEXT_TOKENS
from sglang_coserve.srt.emulation.settings import Emulation
from sglang_coserve.workload.trace import TraceRequest, read_trace, sample_path


def system(
    name: str,
    ttft_s: float,
    gap_s: float,
    tokens_per_s: float | None,
    *,
    unfinished: int = 0,
    label: str = "",
) -> SystemResult:
    """Twenty requests of ten tokens, all the same."""
    online = [
        RequestTimeline(
            rid=f"r{number}",
            arrival_s=float(number),
            token_times_s=tuple(number + ttft_s + gap_s * i for i in range(10)),
            prompt_tokens=10,
            outcome=Outcome.UNFINISHED if number < unfinished else Outcome.FINISHED,
        )
        for number in range(20)
    ]
    offline = None
    if tokens_per_s is not None:
        done = RequestTimeline("done", 0.0, (10.0,), int(20 * tokens_per_s) - 1)
        failed = RequestTimeline("failed", 0.0, (), 0, outcome=Outcome.FAILED)
        offline = [done, failed]
    return SystemResult(name, label or f"the {name}", online, offline, 20.0)


def result(ours: SystemResult, stock: SystemResult) -> DemoResult:
    return DemoResult((system("online_alone", 0.1, 0.01, None), stock, ours), SloTargets())


@pytest.mark.parametrize(
    ("ours", "stock", "parts"),
    [
        (
            system("coserve", 0.11, 0.011, 900),
            system("stock", 0.5, 0.02, 1000),
            [
                "first tokens 1.1 × and 1.1 × with ours, 5.0 × and 5.0 × with stock",
                "gaps between tokens 1.1 × and 1.1 × with ours, 2.0 × and 2.0 × with stock",
                "time per token of a request 1.1 × and 1.1 × with ours, 2.0 × and 2.0 × with stock",
                "gets 0.90 × the tokens with ours (900 and 1,000 a second)",
                "better in TTFT P50, TTFT P99, gap P50, gap P99, TPOT P50 and TPOT P99; "
                "worse in offline tokens.",
            ],
        ),
        (
            system("coserve", 0.8, 0.01, 400),
            system("stock", 0.2, 0.01, 1000),
            [
                "gets 0.40 × the tokens",
                "Ours is worse in TTFT P50, TTFT P99 and offline tokens; "
                "alike in gap P50, gap P99, TPOT P50 and TPOT P99.",
            ],
        ),
        (
            system("coserve", 0.204, 0.01, 3000),
            system("stock", 0.2, 0.01, 1000),
            ["gets 3.00 × the tokens", "better in offline tokens; alike in TTFT P50, TTFT P99"],
        ),
        (
            system("coserve", 0.2, 0.01, 100, unfinished=5),
            system("stock", 0.2, 0.01, 100),
            ["too busy", "5 of 20 online requests did not finish"],
        ),
    ],
)
def test_each_metric_of_both_is_told_and_where_ours_is_worse(
    ours: SystemResult, stock: SystemResult, parts: list[str]
) -> None:
    text = sentence(result(ours, stock))
    for part in parts:
        assert part in text


def printed(found: DemoResult) -> str:
    out = StringIO()
    Console(width=100, file=out).print(as_table(found))
    return out.getvalue()


def test_latencies_are_set_against_those_alone_in_a_hundred_columns() -> None:
    stock = system("stock", 1.235, 0.02, 22_222, label="stock SGLang, tuned")
    text = printed(result(system("coserve", 0.11, 0.011, 900), stock))
    assert "…" not in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert any(row.startswith("P50 P99 P50 P99 P50 P99") for row in rows)
    first = rows.index("stock SGLang, tuned 1,235 1,235 20.0 20.0 20.0 20.0 22,222 20/20")
    assert rows[first + 1] == "12.35 × 12.35 × 2.00 × 2.00 × 2.00 × 2.00 × 1 failed"
    ours = rows.index("the coserve 110 110 11.0 11.0 11.0 11.0 900 20/20")
    assert rows[ours + 1] == "1.10 × 1.10 × 1.10 × 1.10 × 1.10 × 1.10 × 0.04 ×"


def test_the_share_of_tokens_in_a_message_is_in_the_report() -> None:
    ours = system("coserve", 0.11, 0.011, 900)
    together = RequestTimeline("r", 0.0, (1.0, 1.0, 2.0), 10)
    ours = replace(ours, online=[*ours.online, together])
    found = as_json(result(ours, system("stock", 0.5, 0.02, 1000)), "")["online"]
    assert found["tokens_per_message"] == round(203 / 202, 3)


def test_cores_are_told_by_role() -> None:
    before = CpuTimes({"client": 1.0, "scheduler": 2.0}, 10.0)
    after = CpuTimes({"client": 2.0, "scheduler": 11.0, "detokenizer": 0.5}, 25.0)
    cpu = CpuUse.between(before, after, 10.0)
    assert cpu.by_role == pytest.approx(
        {"client": 0.1, "scheduler": 0.9, "detokenizer": 0.05, "other_programs": 0.45}
    )
    ours = replace(system("coserve", 0.11, 0.011, 900), cpu=cpu)
    assert cpu_lines([ours, system("stock", 0.5, 0.02, 1000)]) == [
        "cores in use, the coserve: scheduler 0.90, other programs 0.45, client 0.10, "
        "detokenizer 0.05"
    ]
    assert as_json(DemoResult((ours,), SloTargets()), "")["cores"]["scheduler"] == 0.9


def test_what_is_emulated_says_so_wherever_it_is_shown(tmp_path: Path) -> None:
    name = "emulated-llama-3.1-8b-h100"
    ours, stock = system("coserve", 0.11, 0.011, 900), system("stock", 0.5, 0.02, 1000)
    for found in (
        replace(result(ours, stock), emulated=name),
        DemoResult((ours,), SloTargets(0.5, 0.1), name),
    ):
        assert f"{name}, no GPU" in printed(found)
        assert sentence(found).startswith(f"{name}, no GPU: ")
        assert ("--quick" in sentence(found)) == (len(found.systems) == 1)
        assert as_json(found, "")["emulated"] == name
        assert f"{name}, no GPU" in drawn(found, tmp_path)
    computed = result(ours, stock)
    assert as_json(computed, "")["emulated"] is None
    assert "emulated" not in sentence(computed)


def drawn(found: DemoResult, folder: Path) -> str:
    with rc_context({"svg.fonttype": "none"}):  # Its text stays text.
        draw(found, folder / "timeline.svg")
    return (folder / "timeline.svg").read_text()


def test_the_picture_shows_the_figures_of_the_sentence(tmp_path: Path) -> None:
    found = result(system("coserve", 0.11, 0.011, 900), system("stock", 0.5, 0.02, 1000))
    text = drawn(found, tmp_path)
    for part in ("P50 500.0, P99 500.0", "P50 11.0, P99 11.0", "mean 900", "mean 1,000", "none"):
        assert part in text


def test_bundled_prompts_take_their_share_of_any_device() -> None:
    sample = list(read_trace(sample_path("online")))
    for model, hardware in (("llama-3.1-8b", "h100"), ("llama-2-7b", "b200")):
        emulation = Emulation.of(model, hardware)
        latency = emulation.latency_model()
        scale = LoadScale.for_device(sample, latency, emulation.chunk_tokens)
        scaled = list(scale.applied(sample))
        device_s = sum(latency.predict(StepStats.of([(r.prompt_tokens, 0)], [])) for r in scaled)
        assert 0.15 < device_s / scaled[-1].arrival_s < 0.25
        assert max(r.prompt_tokens + r.output_tokens for r in scaled) < CONTEXT_TOKENS
        assert f"prompts {scale.prompts:.1f} × as long" in str(scale)


def test_a_trace_of_the_users_stays_as_it_is() -> None:
    requests = [TraceRequest(0, 0.0, 0, 5), TraceRequest(1, 1.5, 7, 0)]
    assert list(LoadScale().applied(requests)) == requests
    assert (LoadScale().lines_in_one, str(LoadScale())) == (1, "")


def first(count: int, source: Path, **given: Any) -> list[StreamedRequest]:
    return list(islice(repeated(source, **{"fields": {}, **given}), count))


def test_lines_are_repeated_without_end(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    chat = {"messages": [{"role": "user", "content": "Who?\u2028\x85"}]}
    bodies = [{"prompt": "The old mill"}, chat, {"input": [1, 2]}]
    fields = {"method": "POST", "url": "/v1/completions"}
    texts = [
        json.dumps({"custom_id": f"l{i}", **fields, "body": b}, ensure_ascii=False)
        for i, b in enumerate(bodies)
    ]
    source.write_text("\r\n".join(texts) + "\n\n")
    found = first(8, source, fields={"priority": 0})
    assert [request.custom_id for request in found] == ["l0", "l1", "l2"] * 2 + ["l0", "l1"]
    assert all(request.body["stream"] and request.body["priority"] == 0 for request in found)
    assert [request.body["prompt"] for request in found[::3]] == [
        *("The old mill", "Copy 1. The old mill", "Copy 2. The old mill")
    ]
    assert found[4].body["messages"][0]["content"] == "Copy 1. Who?\u2028\x85"
    assert found[1].body["messages"][0]["content"] == "Who?\u2028\x85"


@pytest.mark.parametrize(
    ("messages", "second"),
    [
        ([{"content": [{"type": "text", "text": "Who?"}]}], "Copy 1. "),
        ([{"role": "user"}], None),
        ("Who?", None),
    ],
)
def test_messages_that_are_no_texts_are_repeated_too(
    tmp_path: Path, messages: Any, second: str | None
) -> None:
    line = {"custom_id": "l", "method": "POST", "url": "/v1/chat/completions"}
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({**line, "body": {"messages": messages}}) + "\n")
    one, other = (request.body["messages"] for request in first(2, source))
    assert one == messages
    if second is None:
        assert other == messages
    else:
        parts = messages[0]["content"]
        assert other == [{"content": [{"type": "text", "text": second}, *parts]}]


def test_lines_are_joined_for_longer_prompts() -> None:
    source = sample_path("offline")
    alone = [json.loads(text) for text in source.read_text().splitlines()]
    joined = first(3, source, lines_in_one=150)
    assert [line.custom_id for line in joined] == [alone[i]["custom_id"] for i in (0, 150, 300)]
    messages = [message for line in joined for message in line.body["messages"]]
    assert messages == [message for line in alone for message in line["body"]["messages"]]
    assert joined[0].body["max_tokens"] == alone[0]["body"]["max_tokens"]


def test_a_file_without_requests_is_told(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    with pytest.raises(InputFileError, match="cannot be read"):
        repeated(path, {})
    for content, says in (("\n", "no request"), ("no JSON\n", "not valid JSON")):
        path.write_text(content)
        with pytest.raises(InputFileError, match=says):
            repeated(path, {})


def test_a_picture_that_cannot_be_drawn_is_told_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(errors._EXTRAS, "plot", ("no_such_package",))
    with pytest.raises(MissingExtraError, match=r"timeline.png needs .*\[plot\]"):
        run_demo(DemoOptions(trace=Path("missing.csv")), Console())
