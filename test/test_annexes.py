"""Each annex can be deleted: the rest starts without its folders, and serves what is left to it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import sglang_coserve
from batch.route_calls import completed, create, texts
from batch.scenarios import lines
from batch.scripted_backend import tokens_of
from calls import call, client_of
from fleet.gateway_process import EngineThread, gateway
from sglang_coserve.config import CoserveConfig
from sglang_coserve.errors import UnsupportedError
from sglang_coserve.local_server import LocalServer
from sglang_coserve.srt.kv_store import KvStoreSetup

PACKAGE = Path(sglang_coserve.__file__).parent


@dataclass(frozen=True)
class Annex:
    folders: tuple[str, ...]
    registered_in: Mapping[str, str] = field(default_factory=dict)
    """By file, its name in the two lines that register it: an import and one more."""

    stand_ins: Mapping[str, str] = field(default_factory=dict)
    """By such a name, what takes its place. The line is deleted where nothing does."""

    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By file, its flags, and the functions that check them."""

    routes: tuple[tuple[str, str], ...] = ()

    def delete(self, package: Path) -> None:
        for folder in self.folders:
            shutil.rmtree(package / folder)
        for file, name in self.registered_in.items():
            _unregister(package / file, name, self.stand_ins.get(name))
        for file, names in self.settings.items():
            _delete(package / file, names)


def _unregister(path: Path, name: str, stand_in: str | None) -> None:
    before = path.read_text().splitlines(keepends=True)
    word = re.compile(rf"\b{name}\b")
    naming = [number for number, line in enumerate(before) if word.search(line.split("#")[0])]
    assert len(naming) == 2, "registered by its import and one line"
    after = before.copy()
    after[naming[0]] = ""
    after[naming[1]] = "" if stand_in is None else word.sub(stand_in, before[naming[1]])
    path.write_text("".join(after))


def _delete(path: Path, names: tuple[str, ...]) -> None:
    """Delete fields and functions, and the statements that call the functions."""
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    found = set()
    for node in ast.walk(ast.parse(text)):
        match node:  # Fields, functions, and their calls.
            case (
                ast.AnnAssign(target=ast.Name(id=name))
                | ast.FunctionDef(name=name)
                | ast.Expr(value=ast.Call(func=ast.Name(id=name)))
            ) if name in names:
                found.add(name)
                assert node.end_lineno is not None
                for number in range(node.lineno - 1, node.end_lineno):
                    lines[number] = ""
    assert found == set(names)
    path.write_text("".join(lines))


POOLS = Annex(
    ("fleet/pools", "srt/kv_moves"),
    {"fleet/optional_parts.py": "LinePools", "srt/optional_parts.py": "FileMovesSetup"},
    {"LinePools": "LineMoves", "FileMovesSetup": "RequestMovesSetup"},
    {"config/coserve.py": ("kv_move_dir", "pool", "_check_pools")},
)
KV_CHECKPOINTS = Annex(
    ("srt/kv_checkpoint",),
    {"srt/optional_parts.py": "CheckpointSetup"},
    {"CheckpointSetup": "KvStoreSetup"},
)
"""Pools go before them: moved KV comes from their host pages."""

EMULATION = Annex(
    ("srt/emulation",),
    {"srt/optional_parts.py": "EmulatedGpu"},
    {"EmulatedGpu": "Platform"},
)
CPU = Annex(("srt/cpu",), {"srt/optional_parts.py": "Cpu"}, {"Cpu": "Platform"})
"""Goes with the emulation, which builds on it."""

GUARD = Annex(("guard",), {"srt/optional_parts.py": "Guard"}, {"Guard": "RequestGuard"})

ANNEXES = (
    Annex(("ray",)),
    Annex(
        ("batch/uploads",),
        {"batch/api.py": "UPLOADS"},
        routes=(("POST", "/v1/uploads"), ("POST", "/v1/uploads/upload_1/cancel")),
    ),
    Annex(
        ("batch/responses",),
        {"batch/api.py": "BACKGROUND_RESPONSES"},
        routes=(
            ("GET", f"/v1/responses/resp_{0:024x}"),
            ("POST", f"/v1/responses/resp_{0:024x}/cancel"),
        ),
    ),
    Annex(
        ("batch/webhooks",),
        {"batch/api.py": "WEBHOOKS"},
        settings={"config/batch_api.py": ("batch_webhook_url",)},
    ),
    POOLS,
)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineThread]:
    with EngineThread() as engine:
        yield engine


@pytest.fixture
def package(tmp_path: Path) -> Path:
    package = tmp_path / "python" / PACKAGE.name
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    return package


@pytest.mark.parametrize("annex", ANNEXES, ids=lambda annex: annex.folders[0])
def test_the_rest_serves_batches_without_it(
    annex: Annex,
    engine: EngineThread,
    tmp_path: Path,
    package: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    annex.delete(package)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    with gateway(tmp_path, "--engine", engine.url) as server, client_of(server) as client:
        done = texts(completed(client, create(client, lines(2)).id))
        assert done == {f"id-{n}": " ".join(map(str, tokens_of(f"id-{n}", 4))) for n in (1, 2)}
        for method, path in annex.routes:
            answer = call(server, method, path)
            assert answer.status_code == 404
            assert answer.json()["error"]["message"]


def test_an_engine_keeps_its_checkpoints_without_pools(
    small_model: Path, tmp_path: Path, package: Path
) -> None:
    POOLS.delete(package)
    with _server(small_model, tmp_path, package, "--kv-checkpoint", "eager") as server:
        config = call(server, "GET", "/coserve/status").json()["replicas"][0]["config"]
        assert "kv_checkpoint" in config
        assert "kv_move_dir" not in config, "it is not the copy that runs"
        _serves_a_batch(server)


def test_an_engine_serves_both_classes_without_any_part(
    small_model: Path, tmp_path: Path, package: Path
) -> None:
    for annex in (POOLS, KV_CHECKPOINTS, EMULATION, CPU, GUARD):
        annex.delete(package)
    with _server(small_model, tmp_path, package, *WITHOUT_DEFAULTS) as server:
        with client_of(server) as client:
            answer = client.completions.create(
                model=client.models.list().data[0].id, prompt="here", max_tokens=4
            )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        _serves_a_batch(server)
        status = call(server, "GET", "/coserve/status").json()
        assert status["emulated"] is None
        assert status["replicas"][0]["kv_checkpoint"] == {"mode": "off"}


WITHOUT_DEFAULTS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
    *("--disable-overlap-schedule", "--max-total-tokens", "8192"),
)
"""Flags with which SGLang itself serves the small model on a CPU."""

READY_S = 300.0


def _server(model: Path, directory: Path, package: Path, *flags: str) -> LocalServer:
    """A server of the copied package."""
    return LocalServer(
        [
            *("--model-path", str(model), "--startup-profile-seconds", "0"),
            *("--coserve-data-dir", str(directory / "data"), *flags),
        ],
        log_path=directory / "server.log",
        ready_timeout_s=READY_S,
        # No server with another path is forked from a process that has imported the original.
        extra_env={"PYTHONPATH": str(package.parent), "SGLANG_USE_CPU_ENGINE": "1"},
    )


def _serves_a_batch(server: LocalServer) -> None:
    with client_of(server) as client:
        done = completed(client, create(client, lines(2, max_tokens=4)).id)
    assert done.keys() == {"id-1", "id-2"}


def test_without_emulation_its_flag_is_refused(tmp_path: Path, package: Path) -> None:
    EMULATION.delete(package)
    make = ("-m", "sglang_coserve", "make-model", str(tmp_path / "model"))
    assert _run(package, *make).returncode == 0
    refused = _run(package, *make, "--emulate", "llama-3.1-8b")
    assert refused.returncode == 2
    assert "--emulate: this installation has no emulated GPU" in refused.stderr


def test_without_checkpoints_their_flag_is_refused() -> None:
    setup, config = KvStoreSetup(), CoserveConfig(kv_checkpoint="eager")
    with pytest.raises(UnsupportedError, match="--kv-checkpoint eager: this installation has no"):
        setup.server_settings({}, config, on_cpu=True)
    assert setup.server_settings({}, CoserveConfig(), on_cpu=True) == {}


def _run(package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=READY_S)
