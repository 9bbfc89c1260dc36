"""Each annex can be deleted: the rest starts without its folder, and serves what is left to it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import sglang_coserve
from batch.route_calls import completed, create, texts
from batch.scenarios import lines
from batch.scripted_backend import tokens_of
from calls import call, client_of
from fleet.gateway_process import EngineThread, gateway
from sglang_coserve.local_server import LocalServer

PACKAGE = Path(sglang_coserve.__file__).parent


READY_S = 300.0


@dataclass(frozen=True)
class Annex:
    folder: str
    registered_in: str | None = None
    name: str = ""
    """In the lines that register it."""

    routes: tuple[tuple[str, str], ...] = ()
    flag: str | None = None
    """Field of ``BatchApiConfig``, the setting of this annex alone."""

    def delete(self, package: Path) -> None:
        shutil.rmtree(package / self.folder)
        if self.registered_in is not None:
            path = package / self.registered_in
            before = path.read_text().splitlines(keepends=True)
            after = [line for line in before if self.name not in line]
            assert len(before) - len(after) == 2, "registered by its import and one line"
            path.write_text("".join(after))
        if self.flag is not None:
            _delete_field(package / "config" / "batch_api.py", self.flag)


def _delete_field(path: Path, name: str) -> None:
    text = path.read_text()
    fields = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.AnnAssign)]
    (field,) = (node for node in fields if ast.unparse(node.target) == name)
    lines = text.splitlines(keepends=True)
    path.write_text("".join(lines[: field.lineno - 1] + lines[field.end_lineno :]))


ANNEXES = (
    Annex("ray"),
    Annex(
        "batch/uploads",
        "batch/api.py",
        "UPLOADS",
        (("POST", "/v1/uploads"), ("POST", "/v1/uploads/upload_1/cancel")),
    ),
    Annex(
        "batch/responses",
        "batch/api.py",
        "BACKGROUND_RESPONSES",
        (
            ("GET", f"/v1/responses/resp_{0:024x}"),
            ("POST", f"/v1/responses/resp_{0:024x}/cancel"),
        ),
    ),
    Annex("batch/webhooks", "batch/api.py", "WEBHOOKS", flag="batch_webhook_url"),
)


@dataclass(frozen=True)
class Part:
    """An annex of the engine, registered in ``srt/optional_parts.py``."""

    folder: str
    kind: str
    """The class that is imported and registered."""

    stand_in: str
    """Takes its place."""

    def delete(self, package: Path) -> None:
        shutil.rmtree(package / self.folder)
        path = package / "srt" / "optional_parts.py"
        text = path.read_text()
        (imported,) = re.findall(rf"^from .* import {self.kind}\n", text, re.MULTILINE)
        registered = re.compile(rf"\] = {self.kind}\b")
        rest = text.replace(imported, "")
        assert len(registered.findall(rest)) == 1
        path.write_text(registered.sub(f"] = {self.stand_in}", rest))


KV_CHECKPOINT = Part("srt/kv_checkpoint", "CheckpointSetup", "KvStoreSetup")
EMULATION = Part("srt/emulation", "EmulatedGpu", "Platform")
CPU = Part("srt/cpu", "Cpu", "Platform")
GUARD = Part("guard", "Guard", "RequestGuard")

WITHOUT_DEFAULTS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
    *("--disable-overlap-schedule", "--max-total-tokens", "8192"),
)
"""Flags with which SGLang itself serves the small model on a CPU."""


def copied(directory: Path) -> Path:
    """A copy of the package below ``directory``."""
    package = directory / "python" / PACKAGE.name
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    return package


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineThread]:
    with EngineThread() as engine:
        yield engine


@pytest.mark.parametrize("annex", ANNEXES, ids=lambda annex: annex.folder)
def test_the_rest_serves_batches_without_it(
    annex: Annex, engine: EngineThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = copied(tmp_path)
    annex.delete(package)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    with gateway(tmp_path, "--engine", engine.url) as server, client_of(server) as client:
        done = texts(completed(client, create(client, lines(2)).id))
        assert done == {f"id-{n}": " ".join(map(str, tokens_of(f"id-{n}", 4))) for n in (1, 2)}
        for method, path in annex.routes:
            answer = call(server, method, path)
            assert answer.status_code == 404
            assert answer.json()["error"]["message"]


def test_an_engine_serves_both_classes_without_any_part(small_model: Path, tmp_path: Path) -> None:
    package = copied(tmp_path)
    for part in (KV_CHECKPOINT, EMULATION, CPU, GUARD):
        part.delete(package)
    server = LocalServer(
        [
            *("--model-path", str(small_model), "--startup-profile-seconds", "0"),
            *("--coserve-data-dir", str(tmp_path / "data"), *WITHOUT_DEFAULTS),
        ],
        log_path=tmp_path / "server.log",
        ready_timeout_s=READY_S,
        extra_env={"PYTHONPATH": str(package.parent), "SGLANG_USE_CPU_ENGINE": "1"},
    )
    with server, client_of(server) as client:
        answer = client.completions.create(
            model=client.models.list().data[0].id, prompt="here", max_tokens=4
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        done = completed(client, create(client, lines(2, max_tokens=4)).id)
        assert done.keys() == {"id-1", "id-2"}
        status = call(server, "GET", "/coserve/status").json()
        assert status["emulated"] is None
        assert status["replicas"][0]["kv_checkpoint"] == {"mode": "off"}


def run(package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=READY_S)


def test_without_emulation_its_flag_is_refused(tmp_path: Path) -> None:
    package = copied(tmp_path)
    EMULATION.delete(package)
    make = ("-m", "sglang_coserve", "make-model", str(tmp_path / "model"))
    assert run(package, *make).returncode == 0
    refused = run(package, *make, "--emulate", "llama-3.1-8b")
    assert refused.returncode == 2
    assert "--emulate: this installation has no emulated GPU" in refused.stderr
