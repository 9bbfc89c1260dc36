"""A message that a scheduler cannot decode ends its own requests only.

SGLang decodes messages as it receives them, in the scheduler's event loop, and an error there ends
the process. The guard decodes each message before it is sent (``guard.tokenizer_manager``); this
is for what it cannot know, such as another version's message.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Final

import msgspec
from sglang.srt.managers import io_struct

from sglang_coserve.srt import compat

_BATCH: Final = "Batch"
"""Begins the names of SGLang's messages with several requests."""

logger = logging.getLogger(__name__)


def refuse_undecodable(scheduler: Any) -> None:
    """Make SGLang's receiver in this process refuse what it cannot decode, and read on.

    Pickled messages are left to SGLang: they are decoded without regard to types.
    """

    def receive(socket: Any, flags: int = 0) -> Any:
        if io_struct._USE_PICKLE_IPC:
            return io_struct.sock_recv(socket, flags)
        while True:
            data = socket.recv(flags)
            try:
                return io_struct.msgpack_decode(data)
            except Exception as error:
                logger.exception("a message to the scheduler cannot be decoded")
                for rid in rids_in(data):
                    refused = SimpleNamespace(rid=rid, http_worker_ipc=None)
                    message = f"the request cannot be decoded: {error}: leave the field out"
                    compat.refuse(scheduler, refused, HTTPStatus.BAD_REQUEST, message)

    compat.replace("sglang.srt.managers.scheduler_components.request_receiver.sock_recv", receive)


def rids_in(data: bytes) -> Iterator[str]:
    """Yield the ids of the requests in an encoded message, whatever the types of its fields."""
    try:
        kind, *fields = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, TypeError, ValueError):
        return
    # A batch has two fields of its own before its requests, each of which is [kind, rid, ...].
    requests = fields[2] if str(kind).startswith(_BATCH) else [[kind, *fields]]
    for request in requests:
        if isinstance(request[1], str):
            yield request[1]
