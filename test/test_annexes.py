"""Each annex can be deleted: the rest starts without its folder, and serves a batch."""

from __future__ import annotations

import ast
import shutil
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

PACKAGE = Path(sglang_coserve.__file__).parent


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


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineThread]:
    with EngineThread() as engine:
        yield engine


@pytest.mark.parametrize("annex", ANNEXES, ids=lambda annex: annex.folder)
def test_the_rest_serves_batches_without_it(
    annex: Annex, engine: EngineThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "python" / PACKAGE.name
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    annex.delete(package)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    with gateway(tmp_path, "--engine", engine.url) as server, client_of(server) as client:
        done = texts(completed(client, create(client, lines(2)).id))
        assert done == {f"id-{n}": " ".join(map(str, tokens_of(f"id-{n}", 4))) for n in (1, 2)}
        for method, path in annex.routes:
            answer = call(server, method, path)
            assert answer.status_code == 404
            assert answer.json()["error"]["message"]
