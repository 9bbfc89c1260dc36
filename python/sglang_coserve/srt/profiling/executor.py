"""The profiler's executor: runs single batches on a real SGLang scheduler.

It runs in the scheduler's process while the event loop does not. Batches are built and run by
SGLang's own functions; only the context in the KV cache is not computed, but copied there once.
"""

from __future__ import annotations

import json
import os
import platform
import random
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers.overlap_utils import resolve_forward_inputs
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.common import DynamicGradMode

from sglang_coserve.core.latency_model.model import Sample
from sglang_coserve.profiler.fits import ATTENTION_SETTINGS, ProfiledMachine, attention_name
from sglang_coserve.profiler.latency import LEAST_SHAPES, measure_grid
from sglang_coserve.profiler.shapes import ExecutorLimits, StepShape, plan_grid
from sglang_coserve.srt import compat


def machine_of(scheduler: Any) -> ProfiledMachine:
    """Return the device and the model, on which step times depend."""
    server_args = compat.settings_of(scheduler.server_args)
    runner = scheduler.tp_worker.model_runner.decode_cuda_graph_runner
    model_config = json.loads(scheduler.model_config.hf_config.to_json_string(use_diff=False))
    emulated = model_config.get("emulation")
    return ProfiledMachine(
        hardware=_hardware_name() if emulated is None else f"{emulated['hardware']}, emulated",
        model=server_args.model_path,
        tp_size=server_args.tp_size,
        sglang_version=compat.installed_version() or "",
        model_config=model_config,
        captured_batch_sizes=tuple(sorted(getattr(runner, "capture_bs", ()))),
        attention_backend=attention_name(
            {name: getattr(server_args, name, None) for name in ATTENTION_SETTINGS}
        ),
    )


def _hardware_name() -> str:
    """Return the name of the GPU, or of the CPU with its cores and compute threads."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    processor = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text(encoding="utf-8").splitlines()
        named = (line.split(":", 1)[1] for line in lines if line.startswith("model name"))
        processor = next(named, processor).strip()
    cores = len(os.sched_getaffinity(0))
    return f"CPU {processor}, {cores} cores, {torch.get_num_threads()} threads"


_RADIX_NAMESPACE = "coserve-profiler"
"""Keeps the profiler's prompts from matching prefixes of users' prompts."""

_DONOR_TOKENS = 1024
_NATIVE_MOVES = "use_native_move_kv_cache"


class SchedulerExecutor:
    """Implements ``profiler.shapes.ShapeExecutor`` on an idle scheduler.

    The time of a step is that of ``Scheduler.run_batch``: from the prepared
    batch to its sampled tokens on the host, through all stages of a pipeline. All ranks
    must run the same shapes, and each returns the time of the slowest.

    Layer states other than KV (Mamba) are those of empty contexts, which cost the same.
    """

    def __init__(self, scheduler: Any) -> None:
        idle = scheduler.running_batch.is_empty() and not scheduler.waiting_queue
        assert idle, "requests of users are in the engine"
        self._scheduler = scheduler
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._device = torch.get_device_module(scheduler.req_to_token_pool.device)
        page = self._allocator.page_size
        chunk = scheduler.chunked_prefill_size or scheduler.max_prefill_tokens
        self.limits = ExecutorLimits(
            max_batch_tokens=min(chunk, scheduler.max_prefill_tokens),
            max_request_tokens=scheduler.max_req_len,
            max_requests=min(
                scheduler.max_running_requests, scheduler.req_to_token_pool.available_size()
            ),
            kv_capacity_tokens=self._allocator.available_size() // page * page,
            page_tokens=page,
        )
        """The KV capacity is what was free at the start."""

        generator = random.Random(0)
        vocabulary = range(scheduler.model_config.vocab_size)
        self._tokens = array("q", generator.choices(vocabulary, k=scheduler.max_req_len + 1))
        self._sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
        self._sampling.normalize(None)
        self._fill_kv_pool()

    def run(self, shape: StepShape) -> float:
        """See ``ShapeExecutor.run``."""
        assert self.limits.allow(shape), f"outside of {self.limits}: {shape}"
        reqs: list[Req] = []
        free_tokens = self._allocator.available_size()
        with DynamicGradMode():
            try:
                return self._time(self._build(shape, reqs))
            finally:
                self._release(reqs)
                assert self._allocator.available_size() == free_tokens, "a batch leaked KV"

    def _build(self, shape: StepShape, reqs: list[Req]) -> ScheduleBatch:
        """Return the prepared batch; append its requests to ``reqs`` as memory is allocated."""
        decodes = None
        if shape.decodes:
            # A request that starts to decode has KV of all tokens but the last.
            decodes = self._extend([(1, context - 1) for context in shape.decodes], reqs)
            decodes.prefill_input_ids_cpu = None
            last_tokens = self._scheduler.future_map.output_tokens_buf
            last_tokens[decodes.req_pool_indices] = torch.tensor(
                self._tokens[: len(decodes.reqs)], dtype=last_tokens.dtype
            ).to(last_tokens.device)
            for req in decodes.reqs:
                req.output_ids.append(self._tokens[0])
            if not shape.prefills:
                decodes.prepare_for_decode()
                return decodes
        batch = self._extend(shape.prefills, reqs)
        if decodes is not None:
            decodes.prepare_for_decode()
            batch.mix_with_running(decodes)
            batch.decoding_reqs = decodes.reqs
        return batch

    def _extend(self, lengths: Sequence[tuple[int, int]], reqs: list[Req]) -> ScheduleBatch:
        """Return a prepared prefill batch with requests of (tokens, context)."""
        scheduler = self._scheduler
        added = [self._request(tokens, context) for tokens, context in lengths]
        reqs += added
        batch = ScheduleBatch.init_new(
            added,
            scheduler.req_to_token_pool,
            self._allocator,
            scheduler.tree_cache,
            scheduler.model_config,
            False,  # Nothing overlaps with a single batch.
            scheduler.spec_algorithm,
        )
        batch.prepare_for_extend()
        return batch

    def _request(self, tokens: int, context: int) -> Req:
        total = tokens + context
        req = Req(
            "",
            "",
            self._tokens[:total],
            self._sampling,
            vocab_size=self._scheduler.model_config.vocab_size,
            extra_key=_RADIX_NAMESPACE,
        )
        req.init_next_round_input(self._scheduler.tree_cache, cow_mamba=False)
        assert compat.prefix_tokens(req) == 0, "the profiler's prompts are never cached"
        if context:
            compat.place_context(req, self._allocate(context), self._scheduler)
        compat.set_extent(req, context, total)
        return req

    def _allocate(self, tokens: int) -> torch.Tensor:
        """Allocate whole pages for ``tokens`` tokens, and return the slots of these tokens."""
        page = self.limits.page_tokens
        page_tokens = -(-tokens // page) * page
        if page > 1 and self._scheduler.is_hybrid_swa:
            # Only ``alloc_extend`` takes whole pages from both pools.
            none, total = torch.zeros(1, dtype=torch.int64), torch.tensor([page_tokens])
            device = self._allocator.device
            last = torch.full((1,), -1, dtype=torch.int64, device=device)
            slots = self._allocator.alloc_extend(
                none.to(device), none, total.to(device), total, last, page_tokens
            )
        else:
            slots = self._allocator.alloc(page_tokens)
        assert slots is not None, "the limits promise that the KV suffices"
        return slots[:tokens]

    def _time(self, batch: ScheduleBatch) -> float:
        """Run the batch; return the seconds of the slowest rank."""
        scheduler = self._scheduler
        self._device.synchronize()
        start_s = time.perf_counter()
        resolve_forward_inputs(batch, scheduler.future_map)
        stage, beside = scheduler.pp_group, scheduler.attn_tp_group
        proxies = None
        if not stage.is_first_rank:
            proxies = PPProxyTensors(stage.recv_tensor_dict(all_gather_group=beside))
        result = scheduler.model_worker.forward_batch_generation(batch, pp_proxy_tensors=proxies)
        if stage.is_last_rank:
            result.next_token_ids.tolist()
        else:
            tensors = result.pp_hidden_states_proxy_tensors.tensors
            stage.send_tensor_dict(tensors, all_gather_group=beside)
        self._device.synchronize()
        return _of_slowest(scheduler, time.perf_counter() - start_s)

    def _release(self, reqs: Sequence[Req]) -> None:
        for req in reqs:
            compat.free_prepared(req, self._scheduler)

    def _fill_kv_pool(self) -> None:
        """Copy keys and values of a real prompt to every free slot.

        Contexts then need no prefill. They must not be zeros: a GPU draws less
        power on zeros and clocks higher.
        """
        limits = self.limits
        tokens = min(_DONOR_TOKENS, limits.max_batch_tokens, limits.max_request_tokens)
        tokens = min(tokens, limits.kv_capacity_tokens // 2)
        reqs: list[Req] = []
        with DynamicGradMode():
            batch = self._extend([(tokens, 0)], reqs)
            self._time(batch)
            donor = batch.out_cache_loc.long()
            free_tokens = self._allocator.available_size()
            rest = self._allocate(free_tokens // limits.page_tokens * limits.page_tokens)
            pool = self._allocator.get_kvcache()
            with _native_moves(pool):
                for slots in rest.long().split(tokens):
                    pool.move_kv_cache(slots, donor[: len(slots)])
            self._allocator.free(rest)
            self._release(reqs)


@contextmanager
def _native_moves(pool: Any) -> Iterator[None]:
    """Copy KV with torch: SGLang sets its own kernel up only for speculative decoding."""
    parts = [pool, *(getattr(pool, name, None) for name in ("full_kv_pool", "swa_kv_pool"))]
    parts = [part for part in parts if hasattr(part, _NATIVE_MOVES)]
    settings = [getattr(part, _NATIVE_MOVES) for part in parts]
    for part in parts:
        setattr(part, _NATIVE_MOVES, True)
    try:
        yield
    finally:
        for part, value in zip(parts, settings, strict=True):
            setattr(part, _NATIVE_MOVES, value)


def profile_quickly(scheduler: Any, time_limit_s: float) -> list[Sample]:
    """Return samples of an idle scheduler, as many as the time allows and enough to fit a model.

    All ranks must call it before the event loop runs.
    """
    executor = SchedulerExecutor(scheduler)
    measurements = measure_grid(
        executor,
        plan_grid(executor.limits),
        time_limit_s=time_limit_s,
        at_least=LEAST_SHAPES,
        # The choice of the next shape depends on it.
        clock=lambda: _of_slowest(scheduler, time.monotonic()),
    )
    return [measurement.sample for measurement in measurements]


def _of_slowest(scheduler: Any, value: float) -> float:
    """Return the largest value among the ranks, so that all of them decide alike."""
    if compat.num_ranks(scheduler) == 1:
        return value
    box = torch.tensor([value], dtype=torch.float64)
    group = scheduler.world_group.cpu_group
    torch.distributed.all_reduce(box, op=torch.distributed.ReduceOp.MAX, group=group)
    return float(box)
