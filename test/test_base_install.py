"""What is installed without an extra, as docs/examples/Dockerfile installs it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import httpx2
import pytest

from sglang_coserve import __version__, errors
from sglang_coserve.errors import MissingExtraError
from sglang_coserve.local_server import free_port
from waiting import eventually

ROOT = Path(__file__).parents[1]
INSTALL_S = 300
COMMAND_S = 60


def stage(name: str) -> list[str]:
    """The instructions of a stage of the Dockerfile, a continued one as one line."""
    text = (ROOT / "docs" / "examples" / "Dockerfile").read_text().replace("\\\n", "")
    found = re.search(rf"^FROM .* AS {name}$(.*?)(?=^FROM|\Z)", text, re.MULTILINE | re.DOTALL)
    return [line for line in found[1].splitlines() if line and not line.startswith("#")]


def follow(instructions: list[str], folder: Path, bin_folder: Path) -> None:
    """Do what the lines say that copy and install, with folders of the image below ``folder``."""
    for line in instructions:
        words = line.split()
        if words[0] == "COPY" and not words[1].startswith("--from"):
            target = folder / words[-1].lstrip("/")
            for source in (ROOT / word for word in words[1:-1]):
                if source.is_dir():
                    ignored = shutil.ignore_patterns("*.egg-info", "__pycache__")
                    shutil.copytree(source, target, ignore=ignored)
                else:
                    target.mkdir(exist_ok=True)
                    shutil.copy(source, target)
        elif line.startswith("RUN pip "):
            command = re.sub(r" /(?=source|wheels)", f" {folder}/", line.removeprefix("RUN "))
            run_tool("sh", "-c", command, path=bin_folder, limit_s=INSTALL_S)


def run_tool(*command: str, path: Path, limit_s: float = COMMAND_S) -> str:
    done = run(*command, path=path, limit_s=limit_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(*command: str, path: Path, limit_s: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=environment(path),
        cwd=path.parent,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )


def environment(path: Path) -> dict[str, str]:
    """This one, without the checkout, and with the programs in ``path`` first."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"PATH": f"{path}:{os.environ['PATH']}"}


def health(port: int) -> str:
    """What a gateway answers to ``/health``; nothing where none listens."""
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/health", timeout=COMMAND_S).text
    except httpx2.ConnectError:
        return ""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a fresh environment: the gateway's image, without the image."""
    folder = tmp_path_factory.mktemp("image")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=60)
    bin_folder = folder / "venv" / "bin"
    probe = run("pip", "download", "--no-deps", "--dest", str(folder), "typer", path=bin_folder)
    if probe.returncode:
        pytest.skip(f"no package index answers: {probe.stderr.strip().splitlines()[-1]}")
    for name in ("wheel", "gateway"):
        follow(stage(name), folder, bin_folder)
    return bin_folder


def test_neither_torch_nor_sglang_is_there(base: Path) -> None:
    listed = run_tool("pip", "list", "--format", "freeze", path=base)
    names = {line.partition("==")[0].lower() for line in listed.splitlines()}
    assert "sglang-coserve" in names
    assert not names & {"torch", "sglang", "transformers", "scipy", "matplotlib", "ray"}


def test_the_sdist_makes_the_same_wheel(base: Path, tmp_path: Path) -> None:
    """What is published as source lacks no file that the checkout has."""
    folder = base.parents[1]
    build_sdist = "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build_sdist, str(tmp_path)],
        cwd=folder / "source",
        check=True,
        timeout=INSTALL_S,
    )
    sdist = tmp_path / f"sglang_coserve-{__version__}.tar.gz"
    build = ("pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(sdist))
    run_tool(*build, path=base, limit_s=INSTALL_S)
    (ours,) = tmp_path.glob("*.whl")
    (checkout,) = (folder / "wheels").glob("*.whl")
    assert ours.name == checkout.name
    assert sorted(ZipFile(ours).namelist()) == sorted(ZipFile(checkout).namelist())


@pytest.mark.parametrize("command", ["gateway", "submit", "simulate", "top"])
def test_commands_say_how_they_are_used(base: Path, command: str) -> None:
    assert "--help" in run_tool("coserve", command, "--help", path=base)


def test_a_gateway_answers(base: Path, tmp_path: Path) -> None:
    port = free_port()
    command = ["coserve", "gateway", "--engine", "http://127.0.0.1:9", "--port", str(port)]
    with (tmp_path / "gateway.log").open("wb") as output:
        process = subprocess.Popen(
            [*command, "--coserve-data-dir", str(tmp_path / "data")],
            env=environment(base) | {"COSERVE_ENGINE_ADMIN_KEY": "key"},
            stdout=output,
            stderr=output,
        )
    try:
        eventually(lambda: health(port) == "{}")
    finally:
        process.terminate()
        process.wait(COMMAND_S)


@pytest.mark.parametrize("flags", [(), ("--no-batch",)])
def test_a_server_that_is_not_there_is_named(
    base: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text(
        '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}\n'
    )
    command = ["coserve", "submit", str(lines), "-o", str(tmp_path / "results.jsonl")]
    address = ["--base-url", "http://127.0.0.1:9/v1", "--retry-for", "1"]
    done = run(*command, *address, *flags, path=base)
    assert done.returncode == 3
    assert "127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_simulation_runs(base: Path, tmp_path: Path) -> None:
    report = tmp_path / "report"
    command = ["coserve", "simulate", "--duration", "5", "--policy", "coserve", "-o", str(report)]
    assert "simulated" in run_tool(*command, path=base)
    assert (report / "report.json").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-m", "sglang_coserve.launch_server", "--model-path", "model"],
        ["coserve", "serve", "--model-path", "model"],
        ["coserve", "profile", "--model-path", "model", "-o", "profile.json"],
        ["coserve", "make-model", "model"],
        ["python", "-m", "sglang_coserve.demo"],
        ["coserve", "submit", "lines.jsonl", "-o", "results.parquet"],
    ],
)
def test_what_needs_an_extra_says_how_to_install_it(base: Path, command: list[str]) -> None:
    done = run(*command, path=base)
    assert done.returncode == 2
    extra = "remote" if "submit" in command else "engine"
    assert f"pip install 'sglang-coserve[{extra}]'" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_every_extra_has_its_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert errors._EXTRAS.keys() == project["optional-dependencies"].keys() - {"dev"}
    for extra in errors._EXTRAS:
        errors.require(extra, "This environment")


def test_an_extra_that_is_missing_in_part_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(errors._EXTRAS, "plot", ("json", "no_such_package.part"))
    with pytest.raises(MissingExtraError, match=r"A plot needs no_such_.*coserve\[plot\]'"):
        errors.require("plot", "A plot")


def test_what_a_checkout_is_given_lacks_nothing_that_it_needs() -> None:
    """Its packages are pinned and come without dependencies; SGLang's need a GPU in part."""
    pip = [sys.executable, "-m", "pip", "check"]
    found = subprocess.run(pip, capture_output=True, text=True, check=False).stdout.splitlines()
    fine = ("sglang ", "No broken requirements")
    assert [line for line in found if not line.startswith(fine)] == []
