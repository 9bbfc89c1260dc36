"""That what co-serving relies on is listed, is in the installed SGLang, and is missed elsewhere."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

import seam_check
import seam_report
from seam_check import own_files, problems
from seams import SEAMS, NameUse, Seam
from sglang_coserve.errors import StartupError
from sglang_coserve.srt.compat import by_version, replace, v17, v23
from source_tree import SourceTree

INSTALLED = importlib.metadata.version("sglang")
BATCH = "sglang/srt/managers/schedule_batch.py"


def tree(files: dict[str, str]) -> SourceTree:
    return SourceTree(files.get)


def check_only(monkeypatch: pytest.MonkeyPatch, *seams: Seam) -> None:
    for module in (seam_check, seam_report):
        monkeypatch.setattr(module, "seams_of", lambda _version: list(seams))
    monkeypatch.setattr(seam_check, "_own_nodes", lambda _version: iter(()))


# --- This package ------------------------------------------------------------------------


def test_every_seam_is_in_the_installed_sglang() -> None:
    assert problems(SourceTree.installed(), INSTALLED) == []


def test_modules_of_sglang_are_changed_in_one_place() -> None:
    """Which is told which names there are."""
    found = []
    for path in own_files():
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        names = [
            alias
            for node in imports
            if f"{node.module}.".startswith("sglang.")
            for alias in node.names
        ]
        modules = {alias.asname or alias.name for alias in names if alias.name.islower()}
        targets = [target for node in nodes for target in getattr(node, "targets", ())]
        changed = [target.value for target in targets if isinstance(target, ast.Attribute)]
        found += [
            f"{path.name}:{module.lineno}"
            for module in changed
            if isinstance(module, ast.Name) and module.id in modules
        ]
    assert found == []


def test_both_files_have_every_function_and_one_of_them_is_used() -> None:
    used = v17 if INSTALLED == "0.5.17" else v23
    functions = [name for name, found in vars(v23).items() if inspect.isfunction(found)]
    public = [name for name in functions if getattr(v23, name).__module__ == v23.__name__]
    assert len(public) > 20
    for name in (name for name in public if not name.startswith("_")):
        assert getattr(by_version, name) is getattr(used, name), name
        assert getattr(v17, name) is not getattr(v23, name), name
        parameters = [inspect.signature(getattr(file, name)).parameters for file in (v17, v23)]
        assert list(parameters[0]) == list(parameters[1]), name


# --- Replacements ------------------------------------------------------------------------


def test_a_replaced_name_is_given_back() -> None:
    import sglang.srt.lora.layers as layers

    name = "sglang.srt.lora.layers.torch"
    ours = object()
    former = replace(name, ours)
    assert layers.torch is ours
    assert replace(name, former) is ours
    assert layers.torch is former


def test_what_is_replaced_is_listed() -> None:
    listed = {seam.name for seam in SEAMS if seam.use is NameUse.REPLACED}
    replaced = set()
    for path in own_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("replace"):
                names = [one.value for one in node.args[:1] if isinstance(one, ast.Constant)]
                replaced |= {name for name in names if str(name).startswith("sglang.")}
    assert replaced
    assert replaced <= listed


@pytest.mark.parametrize("name", ["sglang.srt.lora.layers.gone", "sglang.srt.gone.torch"])
def test_replacing_what_is_not_there_is_an_error(name: str) -> None:
    with pytest.raises(StartupError, match=f"SGLang {INSTALLED} has no {name}"):
        replace(name, None)


# --- What is found out about another version ---------------------------------------------


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("class Req:\n    def end(self, why, when=0): pass", None),
        ("class Base:\n    def end(self, why): pass\nclass Req(Base): pass", None),
        ("class Req:\n    def end(self, cause): pass", "has parameters ['cause']"),
        ("class Req:\n    def end(self, why, when): pass", "needs also ['when']"),
        ("class Req:\n    def end(self, why, *, when): pass", "needs also ['when']"),
        ("class Req:\n    def stop(self, why): pass", "not there"),
        ("", "not there"),
    ],
)
def test_a_method_has_to_take_what_it_is_given(
    source: str, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "sglang.srt.managers.schedule_batch.Req.end"
    check_only(monkeypatch, Seam(name, NameUse.CALLED, ("why",)))
    lines = problems(tree({BATCH: source}), "0.5.24")
    if says is None:
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith(f"{name}: ")
        assert says in line


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("def end(a): return 1", "def end(a): return 1  # As it was.", None),
        ("def end(a): return 1", 'def end(a):\n    """Ends."""\n    return 1', None),
        ("def end(a): return 1", "def end(a): return 2", "body changed"),
        ("def end(a): return 1", "def end(a, b=2): return 1", "parameters (a) -> (a, b=2)"),
        ("def end(a): return 1", "", "gone"),
        ("", "def end(a): return 1", "new"),
    ],
)
def test_the_differences_of_two_versions_are_told(
    before: str, after: str, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "sglang.srt.managers.schedule_batch.end"
    check_only(monkeypatch, Seam(name, NameUse.CALLED))
    lines = seam_report.changes(tree({BATCH: before}), tree({BATCH: after}), "0.5.23", "0.5.24")
    assert lines == ([] if says is None else [f"{name}: {says}"])


# --- The script --------------------------------------------------------------------------


@pytest.fixture
def run_report(tmp_path: Path) -> Callable[..., int]:
    return lambda *argv: seam_report.main([*argv, "--wheels", str(tmp_path)])


def test_what_is_no_wheel_is_told_in_one_line(
    run_report: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sglang-0.5.24-py3-none-any.whl").write_text("no archive")
    assert run_report("0.5.24") == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_wheel_that_lacks_everything_is_told_so(
    run_report: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import zipfile

    for version in ("0.5.23", "0.5.24"):
        with zipfile.ZipFile(tmp_path / f"sglang-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("sglang/__init__.py", "")
    assert run_report("0.5.24") == 1
    said = capsys.readouterr().out
    assert "sglang.srt.managers.scheduler.Scheduler: not there, imported by" in said
    assert "0.5.23 -> 0.5.24: 0 changed" in said
