"""Conditional-node safepoints: compiled where there is nvcc, run where there is a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SOURCES = Path(__file__).parents[3] / "sgl-kernel-patches" / "cuda"
RUN_TIMEOUT_S = 120
NO_DEVICE = 77


def build_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("conditional_node_build", SOURCES / "build.py")
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    script = build_script()
    if script.find_nvcc() is None:
        pytest.skip("there is no nvcc")
    try:
        paths: tuple[Path, Path] = script.build(tmp_path_factory.mktemp("conditional_node"))
    except subprocess.CalledProcessError as error:
        pytest.fail(error.stderr)
    return paths


def run(program: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program], capture_output=True, text=True, timeout=RUN_TIMEOUT_S)


def test_it_compiles_and_exports_its_functions(built: tuple[Path, Path]) -> None:
    library: Any = ctypes.CDLL(str(built[0]))
    assert library.coserve_safepoints_begin_pass
    assert library.coserve_safepoint_begin_body
    assert library.coserve_safepoint_end_body


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_program_says_so(built: tuple[Path, Path]) -> None:
    assert run(built[1]).returncode == NO_DEVICE


def test_without_nvcc_the_build_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="nvcc"):
        build_script().build(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_graphs_stop_where_the_flag_is_raised(built: tuple[Path, Path]) -> None:
    done = run(built[1])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["groups"] == 8
