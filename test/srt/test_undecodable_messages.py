"""A message is decoded before it is sent, and one that the scheduler cannot decode harms no other.

With SGLang's own encoding, sockets and receiver; only the scheduler around them is not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput
from sglang.srt.managers.scheduler_components import request_receiver
from transformers import AutoTokenizer

from common.tokenized_request import tokenized_request
from sglang_coserve.guard.tokenizer_manager import _as_the_scheduler_reads
from sglang_coserve.srt.safepoint.inbox import Inbox
from sglang_coserve.srt.scheduler.undecodable import refuse_undecodable


@pytest.fixture(scope="module")
def tokenizer(small_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(small_model)


def request(tokenizer: Any, rid: str, **fields: Any) -> Any:
    made = tokenized_request(tokenizer, rid, [5, 6, 7], 2, offline=False)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


NESTED: list[Any] = [
    {"x": [[1]]},
    {"x": {"a": {"b": 1}}},
    {"x": [{"a": 1}]},
    [1],
    "x",
    {"x": 2**70},
]
FLAT: list[Any] = [None, {}, {"x": 1.5, "y": [1, "a", None, True], "z": {"a": 1}}]


@pytest.mark.parametrize("value", NESTED)
def test_custom_params_that_the_scheduler_cannot_decode_are_refused(
    tokenizer: Any, value: Any
) -> None:
    made = request(tokenizer, "a")
    made.sampling_params.custom_params = value
    with pytest.raises(ValueError, match=r"^custom_params: "):
        _as_the_scheduler_reads(made)


@pytest.mark.parametrize("value", FLAT)
def test_other_custom_params_reach_the_scheduler(tokenizer: Any, value: Any) -> None:
    made = request(tokenizer, "a")
    made.sampling_params.custom_params = value
    assert _as_the_scheduler_reads(made).sampling_params.custom_params == value


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    monkeypatch.setattr(io_struct, "_USE_PICKLE_IPC", False)
    monkeypatch.setattr(request_receiver, "sock_recv", request_receiver.sock_recv)
    with zmq.Context() as context, context.socket(zmq.PAIR) as to, context.socket(zmq.PAIR) as at:
        at.bind("inproc://scheduler")
        to.connect("inproc://scheduler")
        yield to, at


@pytest.mark.parametrize("looks", [False, True])
def test_only_the_requests_of_an_undecodable_message_end(
    tokenizer: Any, sockets: tuple[Any, Any], looks: bool
) -> None:
    to, at = sockets
    answers: list[Any] = []
    sender = SimpleNamespace(send_output=lambda answer, _: answers.append(answer))
    refuse_undecodable(SimpleNamespace(ipc_channels=SimpleNamespace(send_to_tokenizer=sender)))
    wrong = request(tokenizer, "wrong", top_logprobs_num="many")
    batch = BatchTokenizedGenerateReqInput(batch=[request(tokenizer, "first"), wrong])
    for message in (request(tokenizer, "a"), wrong, batch, request(tokenizer, "b")):
        to.send(io_struct.msgpack_encode(message))
    to.send(b"\xc1")
    to.send(io_struct.msgpack_encode(request(tokenizer, "c")))
    inbox = Inbox(at)
    if looks:  # At a safepoint.
        assert [arrival.rid for arrival in inbox.arrivals()] == ["a", "b", "c"]
    received = [request_receiver.sock_recv(inbox, zmq.NOBLOCK).rid for _ in range(3)]
    assert received == ["a", "b", "c"]
    with pytest.raises(zmq.ZMQError):
        request_receiver.sock_recv(inbox, zmq.NOBLOCK)
    assert [answer.rid for answer in answers] == ["wrong", "first", "wrong"]
    assert {answer.finished_reason["status_code"] for answer in answers} == {400}
