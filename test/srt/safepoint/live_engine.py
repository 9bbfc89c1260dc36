"""A ``ScriptedEngine`` whose requests come through the real socket while passes run.

The functions here run in an ``EngineProcess`` that runs no scripts: a talker, in a
thread of its own, sends requests and waits for what it wants to see.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq
from sglang.srt.managers.io_struct import ShutdownReq

from srt.scripted_engine import Iteration, ScriptedEngine

WAIT_S = 60.0


class Talker:
    """Sends messages to the scheduler, as its tokenizer would."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        socket = engine.scheduler.ipc_channels.recv_from_tokenizer
        self._socket = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.bind(socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def send(self, message: Any) -> None:
        self._socket.send(pickle.dumps(message))

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Return once the condition holds."""
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"never came: {what}"
            time.sleep(0.001)

    def wait_for_end(self, rid: str) -> None:
        """Return once a request has ended."""
        reqs = self.engine.reqs
        self.wait(lambda: rid in reqs and reqs[rid].finished(), f"the end of {rid}")

    def close(self) -> None:
        self._socket.close(linger=0)


def run_live(engine: ScriptedEngine, talk: Callable[[Talker], None]) -> list[Iteration]:
    """Run the event loop until ``talk`` has returned; return the forward passes."""
    first = len(engine.iterations)
    talker = Talker(engine)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            talk(talker)
        except BaseException as error:
            failures.append(error)
        finally:
            talker.send(ShutdownReq())

    thread = threading.Thread(target=run)
    thread.start()
    engine.scheduler.gracefully_exit = False
    try:
        engine.scheduler.run_event_loop()
    finally:
        thread.join(WAIT_S)
        talker.close()
    if failures:
        raise failures[0]
    return engine.iterations[first:]


def slow_down(engine: ScriptedEngine, layer_s: float) -> list[int]:
    """Let a prefill of more than 100 tokens take this long a layer.

    Returns a list that gets the number of each such layer when it begins.
    """
    from sglang_coserve.srt.safepoint.instrument import decoder_layers

    layers = decoder_layers(engine.scheduler.tp_worker.model_runner.model)
    begun: list[int] = []
    for number, layer in enumerate(layers):
        # Within the layer: one that is left out takes no time.
        _slow_down(number, layer.mlp, layer_s, begun)
    return begun


def _slow_down(number: int, mlp: Any, layer_s: float, begun: list[int]) -> None:
    forward = mlp.forward

    def slow_forward(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if len(hidden_states) > 100:
            begun.append(number)
            time.sleep(layer_s)
        return forward(hidden_states, *args, **kwargs)

    mlp.forward = slow_forward
