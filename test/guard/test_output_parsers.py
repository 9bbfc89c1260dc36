"""SGLang's parsers of outputs: what takes too long is answered as text, and all else as before."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_coserve.guard import output_parsers
from sglang_coserve.guard.output_parsers import MOST_CPU_S, ParsingTooLongError, _Clock
from sglang_coserve.srt.cpu import defaults as cpu

if not cpu.has_cuda():
    cpu.set_environment_defaults()

SLOW = "[A(A=\t)A(A=,\t" + "\t)A(A=,\t" * 40
"""333 characters for which ``pythonic`` would take years."""

PATCHED = {
    "FunctionCallParser": (
        *("has_tool_call", "parse_non_stream", "parse_stream_chunk", "parse_stream_end"),
    ),
    "JsonArrayParser": ("parse_streaming_increment", "finish"),
    "ReasoningParser": ("parse_non_stream", "parse_non_stream_blocks", "parse_stream_chunk"),
}


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.AbstractEventLoop]:
    """The bounds in this process, for one test."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.function_call.json_array_parser import JsonArrayParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    for owner in (FunctionCallParser, JsonArrayParser, ReasoningParser):
        for name in PATCHED[owner.__name__]:
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(output_parsers, "_CLOCK", _Clock())
    handler = signal.getsignal(signal.SIGVTALRM)
    loop = asyncio.new_event_loop()

    async def install() -> None:
        output_parsers.install_parser_bounds()

    loop.run_until_complete(install())
    yield loop
    loop.close()
    signal.signal(signal.SIGVTALRM, handler)


def parser(name: str = "pythonic") -> Any:
    from sglang.srt.entrypoints.openai.protocol import Function, Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    properties = {"path": {"type": "string"}, "content": {"type": "string"}}
    of_tool = {"type": "object", "properties": properties}
    tool = Tool(type="function", function=Function(name="write", parameters=of_tool))
    return FunctionCallParser(tools=[tool], tool_call_parser=name)


CALL = json.dumps({"name": "write", "arguments": {"path": "/a", "content": "x = 1\n" * 30}})
WRITTEN = f"<tool_call>\n{CALL}\n</tool_call>"


@pytest.mark.usefixtures("bounds")
def test_a_text_that_takes_too_long_is_no_call() -> None:
    begin_s = time.thread_time()
    assert parser().has_tool_call(SLOW) is False
    assert parser().parse_non_stream(SLOW) == (SLOW, [])
    assert time.thread_time() - begin_s < 20 * MOST_CPU_S


@pytest.mark.usefixtures("bounds")
def test_a_stream_that_takes_too_long_is_text_from_then_on() -> None:
    reader, text = parser(), ""
    for begin in range(0, len(SLOW), 50):
        more, calls = reader.parse_stream_chunk(SLOW[begin : begin + 50])
        text += more or ""
        assert calls == []
    text += reader.parse_stream_end()[0] or "" if hasattr(reader, "parse_stream_end") else ""
    assert text == SLOW or SLOW.endswith(text)


def arguments_in(reader: Any, pieces: list[str]) -> str:
    """The arguments of the call of a stream."""
    found = [call for piece in pieces for call in reader.parse_stream_chunk(piece)[1]]
    if hasattr(reader, "parse_stream_end"):
        found += reader.parse_stream_end()[1]
    assert [call.name for call in found if call.name] == ["write"]
    return "".join(call.parameters or "" for call in found)


@pytest.mark.parametrize("waits", [False, True])
def test_a_call_is_read_whole_and_as_a_stream(
    bounds: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Also where each chunk is costly, so that nearly all wait for the end."""
    del bounds
    if waits:
        monkeypatch.setattr(output_parsers, "_COSTLY_S", 0)
        monkeypatch.setattr(output_parsers, "_REST", 1e9)
    text, (call,) = parser("qwen25").parse_non_stream(WRITTEN)
    assert (text, call.name) == ("", "write")
    pieces = [WRITTEN[begin : begin + 4] for begin in range(0, len(WRITTEN), 4)]
    # SGLang begins with a call's name, and ends it as the stream ends.
    streamed = arguments_in(parser("qwen25"), pieces)
    if not waits or hasattr(parser(), "parse_stream_end"):
        assert json.loads(streamed) == json.loads(call.parameters)


def test_a_thread_reads_on_the_loop(bounds: asyncio.AbstractEventLoop) -> None:
    """Which alone can be interrupted; lines of batches are read in a thread."""
    read: list[Any] = []

    async def in_thread() -> None:
        await asyncio.to_thread(lambda: read.append(parser().parse_non_stream(SLOW)))

    bounds.run_until_complete(in_thread())
    assert read == [(SLOW, [])]


@pytest.mark.usefixtures("bounds")
def test_what_comes_after_a_call_is_not_interrupted() -> None:
    clock = output_parsers._CLOCK
    with pytest.raises(ParsingTooLongError):
        clock.bounded(spin, 60.0)
    spin(3 * MOST_CPU_S)
    assert clock.bounded(lambda: "read") == "read"
    assert threading.current_thread() is threading.main_thread()


def spin(cpu_s: float) -> None:
    end_s = time.thread_time() + cpu_s
    while time.thread_time() < end_s:
        pass
