"""A real SGLang scheduler whose event loop runs on a script.

``EngineProcess`` starts a process that holds one scheduler (the real model, the
real KV pool, the real event loops) and runs functions in it that get the
``ScriptedEngine``.  A script is called once per step of the event loop, in
the place where SGLang receives requests, so a test decides to the step when
requests arrive and can look at any state.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common.tokenized_request import tokenized_request
from forked_processes import Forked
from srt.kv_checkpoint.consistency import checking_checkpoints

MAX_ITERATIONS = 20_000
CALL_TIMEOUT_S = 300

Script = Callable[[int], Iterable[Any]]

Spec = tuple[str, list[int], int, bool]
"""A request: rid, prompt, max_new_tokens, whether it is offline."""


@dataclass(frozen=True)
class EngineSpec:
    """What to start. ``stock`` leaves SGLang's own scheduler in place."""

    model: Path
    stock: bool = False
    overlap: bool = False
    server_args: tuple[tuple[str, Any], ...] = ()
    coserve: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        loop = "overlap" if self.overlap else "normal"
        kind = "stock" if self.stock else "coserve"
        return "-".join([kind, loop, *(f"{name}={value}" for name, value in self.server_args)])


@dataclass
class Iteration:
    """What one forward pass ran."""

    rids: list[str]
    is_extend: bool
    extend_lens: list[int] = field(default_factory=list)


class ScriptedEngine:
    """See the module's docstring; lives inside an ``EngineProcess``."""

    def __init__(self, spec: EngineSpec) -> None:
        """Start what ``spec`` says."""
        from sglang_coserve.config import CoserveConfig
        from sglang_coserve.guard.install import install_in_scheduler
        from sglang_coserve.srt import compat
        from sglang_coserve.srt.cpu import defaults as cpu
        from sglang_coserve.srt.cpu.replacements import install_replacements

        cpu.set_environment_defaults()
        import torch
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.server_args import PortArgs, ServerArgs

        from sglang_coserve.srt.optional_parts import KV_STORE
        from sglang_coserve.srt.scheduler.scheduler import CoserveScheduler

        torch.set_num_threads(1)
        install_replacements()
        if not spec.stock:
            install_in_scheduler(compat.logit_processors)
        settings = {
            **cpu.FLAG_DEFAULTS,
            "model_path": str(spec.model),
            "dtype": "float32",
            "disable_overlap_schedule": not spec.overlap,
            "log_level": "warning",
            **dict(spec.server_args),
        }
        # Measured times would differ from run to run.
        coserve = {"startup_profile_seconds": 0.0, **dict(spec.coserve)}
        config = CoserveConfig(**coserve)
        base: Any = Scheduler if spec.stock else CoserveScheduler
        if "kv_checkpoint" in coserve:
            settings |= KV_STORE.server_settings({}, config, on_cpu=True)
            KV_STORE.register(config, on_cpu=True)
            base = checking_checkpoints(base)
            os.environ["SGLANG_CHECK_KV_PAGE_INVARIANTS"] = "1"
        server_args = ServerArgs(**settings)
        server_args._coserve = config
        port_args = PortArgs.init_new(server_args)
        engine = self

        class RecordingScheduler(base):  # type: ignore[misc]
            def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
                engine.reqs[req.rid] = req
                super()._add_request_to_queue(req, is_retracted)

            def process_batch_result(self, batch: Any, result: Any) -> None:
                super().process_batch_result(batch, result)
                extend = batch.forward_mode.is_extend()
                engine.iterations.append(
                    Iteration(
                        [req.rid for req in batch.reqs],
                        extend,
                        list(batch.extend_lens) if extend else [],
                    )
                )

        self.reqs: dict[str, Any] = {}
        self.iterations: list[Iteration] = []
        self.scheduler: Any = compat.start_scheduler(
            RecordingScheduler, server_args, port_args, 0, configures=False
        )
        self._vocab_size: int = self.scheduler.model_config.vocab_size

    # --- Requests ------------------------------------------------------------------------

    def request(
        self,
        rid: str,
        prompt: list[int],
        max_new_tokens: int = 8,
        offline: bool = False,
        **sampling: Any,
    ) -> Any:
        """A tokenized request, as the tokenizer process would send it; greedy, without EOS."""
        tokenizer = self.scheduler.tokenizer
        request = tokenized_request(
            tokenizer, rid, prompt, max_new_tokens, offline=offline, **sampling
        )
        request.sampling_params.verify(self._vocab_size)
        return request

    def abort(self, rid: str = "", *, abort_all: bool = False) -> Any:
        """An abort message."""
        from sglang.srt.managers.io_struct import AbortReq

        return AbortReq(rid=rid, abort_all=abort_all)

    def output(self, rid: str) -> list[int]:
        """Tokens generated for ``rid`` so far."""
        return list(self.reqs[rid].output_ids)

    def outputs(self, specs: Iterable[Spec]) -> dict[str, list[int]]:
        """The same of several requests, by rid."""
        return {spec[0]: self.output(spec[0]) for spec in specs}

    def kv_figures(self) -> dict[str, Any]:
        """What the status says of stored and moved KV, and of tokens that are computed twice."""
        state = self.scheduler.parts.status.state()
        return {
            **state["kv_checkpoint"],
            **state["kv_moves"],
            "recompute": state["recompute"],
        }

    # --- Running -------------------------------------------------------------------------

    def run(
        self, script: Script | Mapping[int, Iterable[Any]] | Iterable[Any] = ()
    ) -> list[Iteration]:
        """Run the event loop until the script is over and nothing is left to do.

        ``script(i)`` returns the messages received in step ``i`` and raises
        ``StopIteration`` when it has no more; a mapping has them by step, and a plain iterable is
        received at once. Returns the forward passes of this run.
        """
        if not callable(script):
            script = _at_steps(script if isinstance(script, Mapping) else {0: list(script)})
        scheduler, first = self.scheduler, len(self.iterations)
        state = {"iteration": 0, "script_over": False}

        def receive(local_reqs: Any = None) -> list[Any]:
            assert state["iteration"] < MAX_ITERATIONS, self._unfinished_work()
            messages: list[Any] = []
            if not state["script_over"]:
                try:
                    messages = list(script(state["iteration"]))
                except StopIteration:
                    state["script_over"] = True
            if state["script_over"] and scheduler.is_fully_idle():
                scheduler.gracefully_exit = True
            state["iteration"] += 1
            return messages

        scheduler.request_receiver = SimpleNamespace(recv_requests=receive)
        scheduler.idle_sleeper = None  # Nothing comes that would wake it.
        scheduler.gracefully_exit = False
        scheduler.run_event_loop()
        return self.iterations[first:]

    def assert_nothing_leaked(self) -> None:
        """Every KV slot is free or cached and unlocked; every request slot is free, and no request
        is known any more."""
        scheduler = self.scheduler
        assert scheduler.is_fully_idle()
        if (parts := getattr(scheduler, "parts", None)) is not None:
            assert not len(parts.requests)
            assert parts.endings.num_unnoticed == 0
        for free, evictable, protected, total in self._kv_pools():
            assert protected == 0
            assert free + evictable == total
        assert scheduler.flush_cache(), "the engine says it is not idle"
        assert all(free == total for free, _, _, total in self._kv_pools())
        pool = scheduler.req_to_token_pool
        assert len(pool.free_slots) == pool.size

    def _unfinished_work(self) -> str:
        """Say what an engine that does not come to rest still has to do."""
        scheduler = self.scheduler
        unfinished = {
            rid: f"{len(req.output_ids)} tokens"
            for rid, req in self.reqs.items()
            if not req.finished()
        }
        parts = getattr(scheduler, "parts", None)
        offline = parts.admission.num_waiting() if parts else 0
        loads = getattr(scheduler.tree_cache, "prefetches", None)
        return (
            f"the engine does not come to rest: {len(scheduler.waiting_queue)} waiting, "
            f"{offline} of ours, running {scheduler.running_batch}, KV {self._kv_pools()}, "
            f"{loads.in_flight_tokens if loads else 0} tokens being loaded, "
            f"unfinished {unfinished}, last passes {self.iterations[-2:]}"
        )

    def _kv_pools(self) -> list[tuple[int, int, int, int]]:
        """Slots of each pool: free, evictable, locked in the radix cache, all."""
        scheduler = self.scheduler
        allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
        if not scheduler.is_hybrid_swa:
            free, total = allocator.available_size(), scheduler.max_total_num_tokens
            pools = [(free, tree.evictable_size(), tree.protected_size(), total)]
            states = getattr(scheduler.req_to_token_pool, "mamba_allocator", None)
            if states is not None:
                cached = tree.mamba_evictable_size() if tree.supports_mamba() else 0
                locked = tree.mamba_protected_size() if tree.supports_mamba() else 0
                pools.append((states.available_size(), cached, locked, states.size))
            return pools
        return [
            (
                allocator.full_available_size(),
                tree.full_evictable_size(),
                tree.full_protected_size(),
                scheduler.full_tokens_per_layer,
            ),
            (
                allocator.swa_available_size(),
                tree.swa_evictable_size(),
                tree.swa_protected_size(),
                scheduler.swa_tokens_per_layer,
            ),
        ]


def run_at_once(engine: ScriptedEngine, specs: Sequence[Spec]) -> dict[str, list[int]]:
    """Run all requests, as online ones, and return their outputs."""
    engine.run([engine.request(*spec[:3]) for spec in specs])
    engine.scheduler.flush_cache()
    return engine.outputs(specs)


def _at_steps(messages: Mapping[int, Iterable[Any]]) -> Script:
    def script(iteration: int) -> Iterable[Any]:
        if iteration > max(messages):
            raise StopIteration
        return messages.get(iteration, ())

    return script


class EngineProcess:
    """A process with one ``ScriptedEngine``; SGLang allows one scheduler per process."""

    def __init__(self, spec: EngineSpec) -> None:
        self._connection, remote = multiprocessing.Pipe()
        self._process = Forked(target=serve, args=(remote, spec), daemon=True)
        self._process.start()
        remote.close()
        self._receive(f"start of {spec}")

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(engine, *args)``, run in the process; assertion errors come back."""
        self._connection.send((function, args))
        return self._receive(function.__name__)

    def _receive(self, what: str) -> Any:
        if not self._connection.poll(CALL_TIMEOUT_S):
            self.close()
            raise TimeoutError(f"{what}: no answer in {CALL_TIMEOUT_S} s")
        try:
            result, error = self._connection.recv()
        except EOFError:
            self._process.join(10)
            raise AssertionError(
                f"{what}: the engine process died with exit code {self._process.exitcode}"
            ) from None
        if error is not None:
            self._process.join(10)  # It ends now: ``is_alive`` must not say otherwise.
            raise AssertionError(error)
        return result

    @property
    def is_alive(self) -> bool:
        """False once a scenario failed in it, or it was closed."""
        return self._process.is_alive()

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.kill()
        self._process.join(10)


def serve(connection: Any, spec: EngineSpec) -> None:
    """Answer the calls of an ``EngineProcess``."""
    os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "1"
    # As precise as all else, so that it does not matter where a prompt is cut.
    os.environ["SGLANG_MAMBA_CONV_DTYPE"] = "float32"
    try:
        engine = ScriptedEngine(spec)
    except BaseException:
        connection.send((None, traceback.format_exc()))
        return
    connection.send((None, None))
    while True:
        try:
            function, args = connection.recv()
            connection.send((function(engine, *args), None))
        except EOFError:
            os._exit(0)
        except BaseException:
            connection.send((None, traceback.format_exc()))
            # A failed scenario leaves requests behind: the next one needs a fresh engine.
            os._exit(1)
