"""Each container of docs/examples, started by its command with its environment, user and files."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
import pytest

from sglang_coserve.local_server import LocalServer
from srt.test_deployment_examples import container, objects, services

START_S = 300
SECRETS = {"api-key": "the key", "engine-admin-key": "the admin key"}
VARIABLES = {"MODEL": "MODEL", "COSERVE_ENGINE_ADMIN_KEY": "the admin key"}
"""What docker compose is told."""


@dataclass(frozen=True)
class Container:
    """What starts it."""

    command: list[str]
    environment: dict[str, str]
    probes: frozenset[str]
    user: int | None = None


def in_kubernetes(kind: str, name: str) -> Container:
    found = container(kind, name)
    variables = {
        each["name"]: SECRETS[each["valueFrom"]["secretKeyRef"]["key"]] for each in found["env"]
    }
    command = [_filled(each, variables, "$(", ")") for each in found["args"]]
    names = [name for name in found if name.endswith("Probe")]
    paths = frozenset(found[name]["httpGet"]["path"] for name in names)
    security = objects()[kind, name]["spec"]["template"]["spec"].get("securityContext", {})
    return Container(command, variables | links(), paths, security.get("runAsUser"))


def links() -> dict[str, str]:
    """What the kubelet sets in every container of a namespace with the Services of the example."""
    found = {}
    for (kind, name), each in objects().items():
        if kind == "Service" and each["spec"].get("clusterIP") != "None":
            prefix, port = name.upper().replace("-", "_"), each["spec"]["ports"][0]["port"]
            found[f"{prefix}_SERVICE_HOST"] = "10.0.0.1"
            found[f"{prefix}_SERVICE_PORT"] = str(port)
            found[f"{prefix}_PORT"] = f"tcp://10.0.0.1:{port}"
            found[f"{prefix}_PORT_{port}_TCP"] = f"tcp://10.0.0.1:{port}"
    return found


def in_compose(name: str) -> Container:
    found = services()[name]
    command = [_filled(each, VARIABLES, "${", "}") for each in found["command"]]
    environment = {
        key: _filled(value, VARIABLES, "${", "}")
        for key, value in found.get("environment", {}).items()
    }
    check = found.get("healthcheck", {}).get("test", ["http://127.0.0.1:30000/health"])[-1]
    return Container(
        command, environment, frozenset({"/" + check.split("30000/")[1].split("'")[0]})
    )


def _filled(text: str, variables: dict[str, str], begin: str, end: str) -> str:
    before, is_there, rest = text.partition(begin)
    if not is_there:
        return text
    name, _, after = rest.partition(end)
    return before + variables[name.partition(":")[0]] + after


def started(found: Container, log: Path, module: str, **paths: str) -> LocalServer:
    """The server of a container, on a port of its own; ``paths`` are of its volumes."""
    command = found.command[1:]
    for inside, outside in paths.items():
        (number,) = (n for n, each in enumerate(command) if f"=/{inside}" in each)
        flag = command[number].partition("=")[0]
        command[number] = f"{flag}={outside}"
    server = LocalServer(command, log_path=log, module=module, ready_timeout_s=START_S)
    server._env = {**os.environ, **found.environment}
    return server


def probed(server: LocalServer, found: Container) -> None:
    for path in sorted({*found.probes, "/ping"}):
        answer = httpx2.get(f"{server.base_url}{path}", timeout=20)
        assert answer.status_code == 200, (path, answer.text)


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(in_kubernetes("Deployment", "coserve-engine"), id="kubernetes"),
        pytest.param(in_compose("engine-1"), id="compose"),
    ],
)
def test_an_engine_starts_and_its_probes_need_no_key(
    found: Container, small_model: Path, tmp_path: Path
) -> None:
    module = "sglang_coserve.launch_server"
    found = replace(found, command=[*found.command, "--dtype=float32"])
    with started(found, tmp_path / "log", module, models=str(small_model)) as server:
        probed(server, found)
        refused = httpx2.get(f"{server.base_url}/coserve/load", timeout=20)
        assert refused.status_code == 401
        framed = httpx2.post(
            f"{server.base_url}/v1/completions",
            content=b"{}",
            headers={"content-length": "2", "transfer-encoding": "chunked"},
            timeout=20,
        )
        assert framed.status_code == 400


@pytest.fixture
def volume() -> Iterator[Path]:
    """A volume that any user can reach."""
    with TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        (root / "volume").mkdir()
        yield root / "volume"


def can_run_as(user: int) -> bool:
    """Return whether that user can start our Python."""
    command = [sys.executable, "-c", "import sglang_coserve"]
    try:
        done = subprocess.run(
            command, user=user, group=user, extra_groups=[], capture_output=True, timeout=60
        )
    except PermissionError:
        return False
    return done.returncode == 0


def mount(volume: Path, security: dict[str, Any]) -> None:
    """Do with a volume what the kubelet does before each start of a pod."""
    group, user = security["fsGroup"], security["runAsUser"]
    is_other = can_run_as(user)
    root = volume.stat()
    has_rights = root.st_mode & 0o2070 == 0o2070
    if has_rights and security.get("fsGroupChangePolicy", "Always") == "OnRootMismatch":
        return
    for path in (volume, *volume.rglob("*")):
        mode = path.stat().st_mode
        if is_other:
            os.chown(path, -1, group)
        path.chmod(stat.S_IMODE(mode) | (0o2070 if path.is_dir() else 0o060))


def test_a_gateway_starts_again_on_its_volume(
    volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = in_kubernetes("StatefulSet", "coserve-gateway")
    security = objects()["StatefulSet", "coserve-gateway"]["spec"]["template"]["spec"][
        "securityContext"
    ]
    assert found.user is not None
    if can_run_as(found.user):
        user = found.user

        def start(command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
            return subprocess.Popen(command, user=user, group=user, extra_groups=[], **settings)

        monkeypatch.setattr(LocalServer, "start_process", staticmethod(start))
    for _ in range(2):
        mount(volume, security)
        log = volume.with_name("log")
        with started(found, log, "sglang_coserve.fleet", data=f"{volume}/batches") as server:
            probed(server, found)


def test_the_gateway_of_compose_starts(volume: Path) -> None:
    found = in_compose("gateway")
    log = volume.with_name("log")
    with started(found, log, "sglang_coserve.fleet", data=f"{volume}/batches") as server:
        probed(server, found)
