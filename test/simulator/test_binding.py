"""Workloads become requests; what is malformed is named."""

from __future__ import annotations

import json
from itertools import combinations, islice
from pathlib import Path

import pytest

from sglang_coserve.core.latency_model.operators import kv_capacity_tokens
from sglang_coserve.core.offline_queue import PackedTokens, unpack_tokens
from sglang_coserve.core.request import RequestClass
from sglang_coserve.errors import ConfigError, InputFileError
from sglang_coserve.simulator.assemble import (
    SimulatedMachine,
    find_shape,
    offline_requests,
)
from sglang_coserve.simulator.binding import from_jsonl, from_trace
from sglang_coserve.simulator.compare import compare
from sglang_coserve.simulator.executor_config import (
    ExecutorConfig,
    SafepointConfig,
)
from sglang_coserve.simulator.observer import RunControl
from sglang_coserve.simulator.options import SimulationOptions
from sglang_coserve.workload.trace import BLOCK_TOKENS, TraceRequest


def shared_tokens(a: PackedTokens, b: PackedTokens) -> int:
    pairs = zip(unpack_tokens(a), unpack_tokens(b), strict=False)
    return next(place for place, (one, other) in enumerate(pairs) if one != other)


def test_equal_hash_ids_become_equal_tokens() -> None:
    trace = [
        TraceRequest(0, 0.0, 3 * BLOCK_TOKENS, 5, (7, 8, 9)),
        TraceRequest(1, 1.0, 3 * BLOCK_TOKENS, 5, (7, 8, 10)),
        TraceRequest(2, 2.0, 100, 5),
    ]
    a, b, c = from_trace(trace, RequestClass.ONLINE)
    assert shared_tokens(a.tokens, b.tokens) == 2 * BLOCK_TOKENS
    assert shared_tokens(a.tokens, c.tokens) == 0
    assert len(unpack_tokens(c.tokens)) == 100
    assert (c.info.arrival_s, c.info.max_new_tokens, c.output_tokens) == (2.0, 5, 5)


@pytest.mark.parametrize("tokens", [1, 5000])
def test_a_prompt_without_hash_ids_is_shared_with_no_one(tokens: int) -> None:
    trace = [TraceRequest(index, 0.0, tokens, 5) for index in range(2)]
    prompts = [
        request.tokens
        for request_class in RequestClass
        for request in from_trace(trace, request_class)
    ]
    assert [len(unpack_tokens(prompt)) for prompt in prompts] == [tokens] * 4
    assert {shared_tokens(a, b) for a, b in combinations(prompts, 2)} == {0}


def test_a_limit_on_outputs_is_what_the_scheduler_is_told() -> None:
    trace = [TraceRequest(0, 0.0, 1, 5), TraceRequest(1, 0.0, 1, 500)]
    requests = list(from_trace(trace, RequestClass.OFFLINE, max_new_tokens=100))
    assert [request.info.max_new_tokens for request in requests] == [100, 100]
    assert [request.output_tokens for request in requests] == [5, 100]


@pytest.mark.parametrize("lengths", [(0, 1), (1, 0), (-3, 5), (5, -3)])
def test_lengths_below_one_are_refused(lengths: tuple[int, int]) -> None:
    with pytest.raises(InputFileError, match=r"offline request 4: .*at least 1"):
        list(from_trace([TraceRequest(4, 0.0, *lengths)], RequestClass.OFFLINE))


def batch_line(content: str, **body: object) -> str:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"custom_id": "x", "body": {"messages": messages, **body}})


def test_batch_files_share_the_prefixes_of_their_texts(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    lines = [
        batch_line("same beginning, one", max_tokens=None),
        "",
        batch_line("same beginning, two", max_tokens=9),
        json.dumps({"body": {"input": "a response", "max_output_tokens": 7}}),
        json.dumps({"body": {"prompt": "half a pair: \ud800"}}),
    ]
    path.write_text("\n".join(lines))
    first, second, *others = from_jsonl(path)
    assert [each.output_tokens for each in (first, second, *others)] == [256, 9, 7, 256]
    assert shared_tokens(first.tokens, second.tokens) == len("user\nsame beginning, ") // 4
    assert first.info.prompt_tokens == -(-len("user\nsame beginning, one\n") // 4)


def test_a_line_has_its_tools_and_calls_and_an_embedding_one_token(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}]
    tools = [{"type": "function", "function": {"name": "f", "description": "y" * 400}}]
    lines = [
        {"url": "/v1/chat/completions", "body": {"messages": messages, "tools": tools}},
        {"url": "/v1/embeddings", "body": {"input": "words"}},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    chat, embedding = from_jsonl(path)
    assert chat.info.prompt_tokens > (400 + len(json.dumps(calls))) / 4
    assert (chat.output_tokens, embedding.output_tokens) == (256, 1)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not a batch request"),
        ("[]", "not a batch request"),
        ('{"body": {}}', "prompt is empty"),
        (batch_line("x", max_tokens=0), "max_tokens"),
        (batch_line("x", max_tokens=True), "max_tokens"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text(f"{batch_line('fine')}\n{line}\n")
    with pytest.raises(InputFileError, match=f"batch.jsonl:2: .*{problem}"):
        list(from_jsonl(path))


def test_a_batch_file_is_read_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text(f"{batch_line('fine')}\n{{\n")
    with pytest.raises(InputFileError, match=r"batch\.jsonl:2: "):
        SimulationOptions(offline=str(path)).workload()


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    empty, broken = tmp_path / "empty.jsonl", tmp_path / "broken.json"
    empty.write_text("\n")
    broken.write_text("{")
    with pytest.raises(InputFileError, match="no request"):
        list(from_jsonl(empty))
    with pytest.raises(InputFileError, match="cannot be read"):
        list(from_jsonl(tmp_path / "missing.jsonl"))
    with pytest.raises(InputFileError, match=r"broken\.json"):
        find_shape(str(broken))


@pytest.mark.parametrize(
    "make",
    [
        lambda: SimulatedMachine.named("llama-3.1-8b", "h100", 0),
        lambda: SimulatedMachine.named("llama-3.1-8b", "abacus"),
        lambda: SimulatedMachine.named("gpt-2", "h100"),
        lambda: ExecutorConfig(kv_capacity_tokens=-1),
        lambda: ExecutorConfig(kv_capacity_tokens=100, page_tokens=0),
        lambda: ExecutorConfig(kv_capacity_tokens=100, page_tokens=64, max_batch_tokens=32),
        lambda: ExecutorConfig(kv_capacity_tokens=100, noise_cv=float("nan")),
        lambda: ExecutorConfig(1000, checkpoint_tokens_per_s=-1.0),
        lambda: SafepointConfig(num_layers=32, interval_layers=0),
        lambda: offline_requests("0x5", max_context_tokens=100),
        lambda: offline_requests("99x5", max_context_tokens=100),
        lambda: SimulationOptions(slo=["ttft p99 <= 1s"], slo_tpot_ms=50.0),
        lambda: SimulationOptions(duration=0.0),
        lambda: compare(SimulationOptions(policy="conserve,nonsense"), Path(), RunControl()),
    ],
)
def test_settings_out_of_range_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(ConfigError):
        make()


def test_lengths_give_an_endless_backlog() -> None:
    _, second = islice(offline_requests("40x6", max_context_tokens=100)(), 2)
    assert (second.info.prompt_tokens, second.output_tokens) == (40, 6)


def test_memory_left_for_kv() -> None:
    machine = SimulatedMachine.named("llama-3.1-70b", "h100", 4)
    tokens = kv_capacity_tokens(machine.shape, machine.hardware, tp_size=4)
    assert tokens == pytest.approx((0.9 * 320e9 - 141.1e9) / 327680, rel=0.01)
