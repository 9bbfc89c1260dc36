"""The torch code that stands in for SGLang's Triton kernels and for sgl_kernel."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace

import pytest
import torch

from sglang_coserve.srt.compat import v17
from sglang_coserve.srt.cpu import defaults as cpu

PAGE_TOKENS = 16


def last_slot(slots: list[int]) -> int:
    return slots[-1] if slots else -1


def test_pages_are_filled_before_new_ones_are_opened() -> None:
    """Random extends and decodes: every request's slots are whole pages in order, none shared."""
    rng = random.Random(3)
    free = torch.randperm(500, generator=torch.Generator().manual_seed(3)) + 1
    held: list[list[int]] = [[] for _ in range(6)]
    for _ in range(40):
        lens = torch.tensor([len(row) for row in held])
        last = torch.tensor([last_slot(row) for row in held])
        grow = torch.tensor([rng.choice([1, 1, 2, 15, 16, 17, 40]) for _ in held])
        decode = bool((lens > 0).all()) and rng.random() < 0.5
        grow = torch.ones_like(grow) if decode else grow
        new_lens = lens + grow
        out = torch.full((int(grow.sum()),), -7)
        if decode:
            v17._alloc_decode(new_lens, last, free, out, 8, PAGE_TOKENS)
        else:
            v17._alloc_extend(lens, new_lens, last, free, out, 8, PAGE_TOKENS)
        opened = int(
            ((new_lens + PAGE_TOKENS - 1) // PAGE_TOKENS - (lens + PAGE_TOKENS - 1) // PAGE_TOKENS)
            .sum()
            .item()
        )
        if opened > len(free):
            assert set(out.tolist()) == {-7} or not decode
            break
        free = free[opened:]
        for row, slots in zip(held, out.split(grow.tolist()), strict=True):
            row.extend(slots.tolist())
    assert sum(map(len, held)) > 500
    owned: dict[int, int] = {}
    for owner, row in enumerate(held):
        for position, slot in enumerate(row):
            assert slot % PAGE_TOKENS == position % PAGE_TOKENS
            assert owned.setdefault(slot // PAGE_TOKENS, owner) == owner


def test_a_missing_kernel_can_be_imported_and_names_itself_when_called() -> None:
    from sgl_kernel import moe_align_block_size

    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.moe_align_block_size"):
        moe_align_block_size(1, 2)


def test_a_missing_submodule_is_an_import_error() -> None:
    with pytest.raises(ImportError):
        import sgl_kernel.flash_attn  # noqa: F401


def ranks(tp_size: int = 1, pp_size: int = 1) -> SimpleNamespace:
    return SimpleNamespace(tp_size=tp_size, pp_size=pp_size, dp_size=1)


def test_defaults_leave_what_is_set() -> None:
    environment = {"OMP_NUM_THREADS": "7", "SGLANG_CPU_OMP_THREADS_BIND": "0"}
    environment["SGLANG_PYSPY_DUMP_BEFORE_CRASH"] = "1"
    cpu.set_environment_defaults(environment)
    with cpu.cores_for(ranks(), environment):
        pass
    assert environment == {
        "OMP_NUM_THREADS": "7",
        "SGLANG_CPU_OMP_THREADS_BIND": "0",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "1",
    }


@pytest.mark.parametrize("tp_size", [1, 2, 3, 64])
def test_every_rank_gets_cores_and_at_least_one_thread(tp_size: int) -> None:
    environment: dict[str, str] = {}
    with cpu.cores_for(ranks(tp_size), environment):
        assert int(environment["OMP_NUM_THREADS"]) >= 1
        sets = environment["SGLANG_CPU_OMP_THREADS_BIND"].split("|")
    assert environment == {}
    assert len(sets) == tp_size
    cores = os.sched_getaffinity(0)
    assert all(one and set(map(int, one.split(","))) <= cores for one in sets)
