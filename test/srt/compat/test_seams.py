"""That what co-serving relies on is listed, is in the installed SGLang, and is missed elsewhere."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import subprocess
import zipfile
from collections import Counter
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import pytest

import seam_check
import seam_report
import seams
import sglang_coserve
from own_uses import Function, OwnUses, Use, defined_in
from seam_check import files_for, own_files, parameters_of, problems
from seams import SEAMS, NameUse, Reason, Seam, listed_in, seams_of
from sglang_coserve.errors import StartupError
from sglang_coserve.srt import compat
from sglang_coserve.srt.compat import by_version, replace, v17, v23
from sglang_coserve.srt.compat.versions import NEWEST, SUPPORTED, module_for, version_key
from source_tree import SourceTree
from srt.compat.test_versions import NEXT

INSTALLED = importlib.metadata.version("sglang")
BATCH = "sglang/srt/managers/schedule_batch.py"
REASON = Reason("a test", "SGLang lacks something.", "SGLang has it.")
ROOT = Path(__file__).parents[3]
UPSTREAM = ROOT / "docs" / "upstream"

OF_OTHERS = frozenset(
    [
        *("_buckets", "_parser", "abort", "call", "drain", "format", "g", "reqs", "route", "scope"),
        *("model", "synchronize", "timer", "url", "value"),
    ]
)
"""Names that functions or private attributes of SGLang have, too, and that we use for others."""


def tree(files: dict[str, str]) -> SourceTree:
    return SourceTree(files.get)


def check_only(monkeypatch: pytest.MonkeyPatch, *seams: Seam) -> None:
    for module in (seam_check, seam_report):
        monkeypatch.setattr(module, "seams_of", lambda _version: list(seams))
    monkeypatch.setattr(seam_check, "uses_for", lambda _version: ())


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


def test_every_module_of_a_version_has_every_function_and_one_is_used() -> None:
    names = [path.stem for path in Path(v23.__file__).parent.glob("v[0-9]*.py")]
    modules = {name: importlib.import_module(f"{compat.__name__}.{name}") for name in names}
    used = modules[module_for(INSTALLED)]
    public = {
        name
        for module in modules.values()
        for name, found in vars(module).items()
        if inspect.isfunction(found) and found.__module__ == module.__name__ and name[0] != "_"
    }
    assert len(public) > 20
    for name in public:
        assert getattr(by_version, name) is getattr(used, name), name
        assert getattr(v17, name) is not getattr(v23, name), name
        functions = [getattr(module, name) for module in modules.values()]
        assert len({tuple(inspect.signature(each).parameters) for each in functions}) == 1, name


# --- The register ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uses() -> OwnUses:
    return OwnUses(own_files(), Path(sglang_coserve.__file__).parents[1])


@pytest.fixture(scope="module")
def in_sglang() -> tuple[frozenset[str], frozenset[str]]:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    return defined_in(Path(spec.origin).parent / "srt")


def listed(*uses: NameUse) -> set[str]:
    return {seam.name for seam in SEAMS if seam.use in uses}


def last(names: set[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def without_entry(found: list[Use], defined: frozenset[str]) -> list[Use]:
    """Return the uses whose last name SGLang defines, and no entry has."""
    known = last(listed(*NameUse)) | OF_OTHERS
    return [use for use in found if use.last in defined - known]


def test_every_override_has_an_entry(uses: OwnUses) -> None:
    sources, known = SourceTree.installed(), listed(NameUse.OVERRIDDEN)
    found = list(uses.overridden())
    assert len(found) > 100
    assert [one for one in found if one.name not in known and sources.find(one.name)] == []


def test_every_entry_of_an_override_has_one(uses: OwnUses) -> None:
    """Of an object's methods, which class it has is written in the register alone."""
    exact = {use.name for use in uses.overridden()}
    by_last_name = {use.name for use in (*uses.assigned(), *uses.set_by_name())}
    inherited = {use.last for use in uses.overridden()}
    entries = listed(NameUse.OVERRIDDEN) - exact
    assert {name for name in entries if last({name}).isdisjoint(by_last_name | inherited)} == set()


def takes_all(ours: Function, parameters: tuple[str, ...]) -> bool:
    """Return whether a method of ours takes these parameters."""
    own, _ = parameters_of(ours)
    if ours.args.vararg or ours.args.kwarg:
        return True
    # Some have a name of their own: SGLang passes them by position.
    positional = len(own) - len(ours.args.kwonlyargs)
    return all(name in own for name in parameters[positional:])


def test_entries_say_which_methods_pass_all_parameters_on() -> None:
    files = OwnUses(files_for(INSTALLED), Path(sglang_coserve.__file__).parents[1])
    entries = {seam.name: seam for seam in seams_of(INSTALLED) if seam.use is NameUse.OVERRIDDEN}
    wrong = []
    for use, ours in files.methods():
        rest = ours.args.kwarg and ours.args.kwarg.arg
        passes_rest = any(isinstance(node, ast.Name) and node.id == rest for node in ast.walk(ours))
        seam = entries.get(use.name)
        if seam is not None and not (
            passes_rest == (seam.passes_rest or seam.parameters is None)
            and takes_all(ours, seam.parameters or ())
        ):
            wrong.append((use, seam.parameters))
    assert wrong == []


def test_what_is_replaced_has_an_entry_and_the_reverse(uses: OwnUses) -> None:
    assert {use.name for use in uses.replaced()} == listed(NameUse.REPLACED)


def test_every_method_assigned_to_an_object_has_an_entry(
    uses: OwnUses, in_sglang: tuple[frozenset[str], frozenset[str]]
) -> None:
    found = [*uses.assigned(), *uses.set_by_name()]
    assert without_entry(found, in_sglang[0]) == []


def test_every_private_name_has_an_entry(
    uses: OwnUses, in_sglang: tuple[frozenset[str], frozenset[str]]
) -> None:
    assert without_entry(list(uses.private()), in_sglang[1]) == []


OBJECTS = {
    **dict.fromkeys(["_scheduler", "scheduler"], "sglang.srt.managers.scheduler.Scheduler"),
    **dict.fromkeys(["batch", "running_batch"], "sglang.srt.managers.schedule_batch.ScheduleBatch"),
    **dict.fromkeys(["req", "request"], "sglang.srt.managers.schedule_batch.Req"),
    **dict.fromkeys(
        ["_manager", "manager"], "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    ),
}
"""The classes of the objects that have these names in our files."""


def test_every_public_name_of_the_main_objects_has_an_entry() -> None:
    sources, known = SourceTree.installed(), set[int]()
    for seam in seams_of(INSTALLED):
        if (definition := sources.find(seam.name)) is not None:
            known.add(id(definition.node))
    files = OwnUses(files_for(INSTALLED), Path(sglang_coserve.__file__).parents[1])
    found = [(use, sources.find(use.name)) for use in files.public(OBJECTS)]
    assert len(found) > 500
    # A name that SGLang's class lacks is ours, or is of an object with the same name here.
    assert [use for use, defined in found if defined and id(defined.node) not in known] == []


def test_every_entry_is_of_a_name_that_we_use(uses: OwnUses) -> None:
    names = last({seam.name for seam in SEAMS if seam.use is not NameUse.RELIED})
    assert [name for name in names if not uses.mentions(name)] == []


def test_names_of_others_are_still_used(uses: OwnUses) -> None:
    found = {use.last for use in (*uses.assigned(), *uses.set_by_name(), *uses.private())}
    assert found >= OF_OTHERS


def test_no_entry_is_there_twice() -> None:
    for version in SUPPORTED:
        entries = [(seam.name, seam.use) for seam in seams_of(version)]
        twice = {entry for entry, count in Counter(entries).items() if count > 1}
        assert twice == set(), version
    titles = re.findall("^== (.+)$", (ROOT / "scripts/seams/seams.txt").read_text(), re.M)
    assert len(titles) == len(set(titles))


def test_versions_of_entries_are_supported_ones() -> None:
    """An entry until an older version is for no supported one, and can go."""
    named = {version for seam in SEAMS for version in (seam.first, seam.last or NEWEST)}
    assert named <= set(SUPPORTED)
    assert [seam.name for seam in SEAMS if seam.last == NEWEST] == []


def test_patches_for_sglang_are_those_that_the_register_names() -> None:
    named = re.findall(r"docs/upstream/(\w+)", " ".join(seam.reason.goes_when for seam in SEAMS))
    assert set(named) == {folder.name for folder in UPSTREAM.iterdir() if folder.is_dir()}
    for name in named:
        assert (UPSTREAM / name / "README.md").is_file()
        assert (UPSTREAM / name / f"{name}.patch").is_file()


@pytest.mark.skipif(
    version_key(INSTALLED) < version_key(NEWEST), reason=f"the patches are for SGLang {NEWEST}"
)
@pytest.mark.parametrize("patch", sorted(UPSTREAM.glob("*/*.patch")), ids=lambda patch: patch.stem)
def test_a_patch_fits_the_installed_sglang(patch: Path) -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    packages = Path(spec.origin).resolve().parents[1]
    done = subprocess.run(
        ["git", "apply", "--check", "--verbose", "-p2", "--include=sglang/*", str(patch)],
        cwd=packages,
        # Git would look at no file outside of a repository that it finds.
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(packages.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Checking patch sglang/" in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "\n== No reason\nread srt.x\n    y\n",
        "\n== Never goes\nwhy: it is so\nread srt.x\n    y\n",
        "\n== No owner\nwhy: it is so\ngoes when: it is not\n    y\n",
        "\n== No version\nwhy: it is so\ngoes when: it is not\nread srt.x since then\n    y\n",
        "\n== No rest\nwhy: it is so\ngoes when: it is not\ncalled srt.x\n    y(a ...)\n",
        "\n== Nowhere\nwhy: it is\ngoes when: it is not\nread x since 2.0.0 until 1.0.0\n    y\n",
    ],
)
def test_an_entry_needs_a_reason_an_owner_and_versions(text: str) -> None:
    with pytest.raises(ValueError, match=r"No|Never"):
        list(listed_in(text))


RENAMED = """
== Renamed
why: it is so
goes when: it is not
read srt.x until 0.5.23
    old
read srt.x since 0.5.24
    new
read srt.x since 0.5.23 until 0.5.24
    passing
read srt.x
    kept
"""


@pytest.mark.parametrize(
    ("version", "names"),
    [
        ("0.5.16", {"old", "kept"}),
        ("0.5.17", {"old", "kept"}),
        ("0.5.20", {"old", "kept"}),
        ("0.5.23", {"old", "passing", "kept"}),
        ("0.5.23.post1", {"old", "passing", "kept"}),
        ("0.5.24", {"new", "passing", "kept"}),
        ("0.5.25", {"new", "kept"}),
        ("0.6.0", {"new", "kept"}),
    ],
)
@pytest.mark.parametrize("newest", ["0.5.23", "0.5.24"])
def test_an_entry_holds_in_its_versions(
    version: str, names: set[str], newest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions that are not supported are read by the code of those that are."""
    supported = ("0.5.17", "0.5.23", "0.5.24")[: 2 if newest == "0.5.23" else 3]
    monkeypatch.setattr(seams, "SUPPORTED", supported)
    monkeypatch.setattr(seams, "NEWEST", newest)
    monkeypatch.setattr(seams, "_OLDEST", supported[0])
    entries = list(listed_in(RENAMED))
    found = {seam.name.rpartition(".")[2] for seam in entries if seam.is_in(version)}
    assert found == names


SOURCE = """
from sglang.srt.x import Base, _hidden
from sglang_coserve.replacements import replace

Made = GUARD.like(Base)

class Direct(Made):
    def run(self):
        return self._private() + self._own
    def _kept(self):
        self._own = self._kept

Base.other = None
replace("sglang.srt.x.name", 1)
for part, value in (("a", 1), ("b", 2)):
    replace(f"sglang.srt.{part}.name", value)
runner.method = runner._hidden_method
for name in ("step", "stop"):
    setattr(runner, name, None)
"""


def test_uses_are_found_in_sources(tmp_path: Path) -> None:
    file = tmp_path / "sglang_coserve" / "a.py"
    file.parent.mkdir()
    file.write_text(SOURCE)
    uses = OwnUses([file], tmp_path)
    assert {use.name for use in uses.overridden()} >= {
        "sglang.srt.x.Base.run",
        "sglang.srt.x.Base.other",
    }
    assert {use.name for use in uses.replaced()} == {
        f"sglang.srt.{part}.name" for part in ("x", "a", "b")
    }
    assert {"method", "other"} == {use.name for use in uses.assigned()}
    assert {"step", "stop"} <= {use.name for use in uses.set_by_name()}
    found = {use.last for use in uses.private()}
    assert found == {"_hidden", "_private", "_hidden_method"}


# --- Replacements ------------------------------------------------------------------------


def test_a_replaced_name_is_given_back() -> None:
    import sglang.srt.lora.layers as layers

    name = "sglang.srt.lora.layers.torch"
    ours = object()
    former = replace(name, ours)
    assert layers.torch is ours
    assert replace(name, former) is ours
    assert layers.torch is former


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
    check_only(monkeypatch, Seam(name, NameUse.CALLED, REASON, ("why",)))
    lines = problems(tree({BATCH: source}), NEXT)
    if says is None:
        assert lines == []
    else:
        (line,) = lines
        assert line.name == name
        assert says in line.says


@pytest.mark.parametrize(
    ("use", "entry", "parameters", "says"),
    [
        ("overridden", "end(why)", "why, when=0", "has also ['when'], which our function does not"),
        ("overridden", "end(why)", "why, *, when=0", "has also ['when']"),
        ("replaced", "end(why)", "why, when=0", "has also ['when']"),
        ("overridden", "end(why)", "why, when", "needs also ['when']"),
        ("overridden", "end(why)", "why, **options", None),
        ("overridden", "end(why ...)", "why, when=0", None),
        ("overridden", "end(why ...)", "why, when", None),
        ("overridden", "end(why ...)", "cause", "has parameters ['cause']"),
        ("overridden", "end", "why, when", None),
        ("called", "end(why)", "why, when=0", None),
    ],
)
def test_our_function_has_to_take_what_sglangs_takes(
    use: str, entry: str, parameters: str, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"\n== x\nwhy: y\ngoes when: z\n{use} srt.managers.schedule_batch\n    {entry}\n"
    check_only(monkeypatch, *listed_in(text))
    lines = problems(tree({BATCH: f"def end({parameters}): pass"}), NEXT)
    assert [says in line.says for line in lines] == ([] if says is None else [True])


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
    check_only(monkeypatch, Seam(name, NameUse.CALLED, REASON))
    lines = seam_report.changes(tree({BATCH: before}), tree({BATCH: after}), NEWEST, NEXT)
    assert list(map(str, lines)) == ([] if says is None else [f"{name}: {says}"])


# --- The script --------------------------------------------------------------------------


@pytest.fixture
def run_report(tmp_path: Path) -> Callable[..., int]:
    return lambda *argv: seam_report.main([*argv, "--wheels", str(tmp_path)])


def test_what_is_no_wheel_is_told_in_one_line(
    run_report: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"sglang-{NEXT}-py3-none-any.whl").write_text("no archive")
    assert run_report(NEXT) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_requirements_that_changed_are_told(
    run_report: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    required = {
        NEWEST: ["torch==2.13.0", "same>=1", "old", 'plot>=1 ; extra == "plot"'],
        NEXT: ["torch==2.14.1", "same>=1", 'new<3; python_version < "3.13"'],
    }
    for version, lines in required.items():
        with zipfile.ZipFile(tmp_path / f"sglang-{version}-py3-none-any.whl", "w") as wheel:
            text = "".join(f"Requires-Dist: {line}\n" for line in lines)
            wheel.writestr(f"sglang-{version}.dist-info/METADATA", f"Name: sglang\n{text}\nText.")
    run_report(NEXT)
    _, _, said = capsys.readouterr().out.partition(f"{NEWEST} -> {NEXT}, requirements: 3 changed")
    assert [line.strip() for line in said.splitlines() if line] == [
        'new: not required -> <3 ; python_version < "3.13"',
        "old: any -> not required",
        "torch: ==2.13.0 -> ==2.14.1",
    ]


def told(lines: list[str], name: str) -> list[str]:
    """Return the lines under the first one of a name that ends so."""
    begin = next(number for number, line in enumerate(lines) if f"{name}: not there" in line)
    return list(takewhile(lambda line: re.search(r"\.py:\d+$", line), lines[begin + 1 :]))


def test_a_wheel_that_lacks_everything_is_told_so(
    run_report: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in (NEWEST, NEXT):
        with zipfile.ZipFile(tmp_path / f"sglang-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("sglang/__init__.py", "")
    assert run_report(NEXT) == 1
    said = capsys.readouterr().out
    lines = [line.strip() for line in said.splitlines()]
    begin = lines.index("sglang.srt.managers.scheduler.Scheduler: not there, imported")
    assert re.fullmatch(r"python/sglang_coserve/srt/\S+\.py:\d+", lines[begin + 1])
    assert f"{NEWEST} -> {NEXT}: 0 changed" in lines
    # An override, an attribute that is read, and a use in a benchmark.
    assert any("/srt/scheduler/scheduler.py:" in line for line in told(lines, "run_batch"))
    assert any("/srt/compat/v23.py:" in line for line in told(lines, "ReqKvInfo.kv_committed_len"))
    assert any("benchmark/common/schedulers.py:" in line for line in lines)
