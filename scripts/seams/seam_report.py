"""``scripts/sglang-seams``: what a version of SGLang would break, before it is installed."""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from seam_check import Finding, imports_for, places_of, problems
from seams import seams_of
from sglang_coserve.srt.compat.versions import SUPPORTED, supported_text, version_key
from source_tree import Definition, SourceTree

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def main(argv: Sequence[str]) -> int:
    """Print the report; return 1 if something is to be mended, 2 if a wheel could not be had."""
    parser = argparse.ArgumentParser(
        prog="scripts/sglang-seams",
        description="Check a version of SGLang against what co-serving relies on in it. Its wheel "
        "is downloaded and read, not installed. Exit status 1: a name is missing, or its "
        "parameters do not fit ours.",
    )
    parser.add_argument("version", metavar="VERSION", type=_version, help="for example 0.5.24")
    parser.add_argument(
        "--since",
        type=_version,
        help="compare with this one (default: the newest supported one before VERSION)",
    )
    parser.add_argument(
        "--wheels", type=Path, help="keep wheels in this directory, and take them from it"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.wheels or Path(temporary)
        try:
            wheel = _wheel(args.version, directory)
            tree = _sources(wheel)
            found = problems(tree, args.version)
            print(f"SGLang {args.version}: {_count(args.version)} checked, {len(found)} to mend")
            _print(found)
            since = args.since or _supported_before(args.version)
            if since != args.version:
                before = _sources(_wheel(since, directory))
                differences = changes(before, tree, since, args.version)
                print(f"{since} -> {args.version}: {len(differences)} changed")
                _print(differences)
                lines = list(_changed_requirements(_wheel(since, directory), wheel))
                print(f"{since} -> {args.version}, requirements: {len(lines)} changed")
                print(*(f"  {line}\n" for line in lines), sep="", end="")
        except (OSError, zipfile.BadZipFile) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 1 if found else 0


def _print(findings: Iterable[Finding]) -> None:
    for finding in findings:
        print(textwrap.indent(str(finding), "  "))


def _supported_before(version: str) -> str:
    """Return the newest supported version before ``version``; the oldest one if there is none."""
    older = [each for each in SUPPORTED if version_key(each) < version_key(version)]
    return older[-1] if older else SUPPORTED[0]


def changes(old: SourceTree, new: SourceTree, old_version: str, new_version: str) -> list[Finding]:
    """Return what differs between two versions in what is relied on in either."""
    # Our places for the new version are what has to be read.
    places = _relied_on(old_version) | _relied_on(new_version)
    found = []
    for name, where in sorted(places.items()):
        says = _change(old.find(name), new.find(name))
        if says is not None:
            found.append(Finding(name, says, tuple(dict.fromkeys(where))))
    return found


def _relied_on(version: str) -> dict[str, list[str]]:
    """Return the names that are relied on in a version, each with our uses."""
    places: dict[str, list[str]] = {}
    for use in imports_for(version):
        places.setdefault(use.name, []).append(use.where)
    for seam in seams_of(version):
        places.setdefault(seam.name, []).extend(places_of(seam, version))
    return places


def _change(old: Definition | None, new: Definition | None) -> str | None:
    if old is None or new is None:
        return None if old is new else ("gone" if new is None else "new")
    before, after = _signature(old), _signature(new)
    if before != after:
        return f"parameters {before} -> {after}"
    if old.module != new.module:
        return f"moved from {old.module} to {new.module}"
    if isinstance(old.node, _Function) and isinstance(new.node, _Function):
        return None if _body(old.node) == _body(new.node) else "body changed"
    return None


def _signature(definition: Definition) -> str | None:
    """Return the parameters of a function as they are written; None of anything else."""
    if not isinstance(definition.node, _Function):
        return None
    return f"({ast.unparse(definition.node.args)})"


def _body(node: _Function) -> str:
    """Return a function's statements in one form, without its docstring."""
    begin = 1 if ast.get_docstring(node) is not None else 0
    return "\n".join(map(ast.unparse, node.body[begin:]))


def _changed_requirements(old: Path, new: Path) -> Iterator[str]:
    """Yield which packages two wheels require in other versions, extras left out."""
    before, after = _requirements(old), _requirements(new)
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name, "not required"), after.get(name, "not required")
        if was != now:
            yield f"{name}: {was or 'any'} -> {now or 'any'}"


def _requirements(wheel: Path) -> dict[str, str]:
    """Return the versions of each package that a wheel requires."""
    found: dict[str, list[str]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for path in (name for name in archive.namelist() if name.endswith(".dist-info/METADATA")):
            for line in archive.read(path).decode().splitlines():
                if line.startswith("Requires-Dist: ") and "extra ==" not in line:
                    requirement = Requirement(line.removeprefix("Requires-Dist: "))
                    condition = f" ; {requirement.marker}" if requirement.marker else ""
                    versions = f"{requirement.specifier}{condition}"
                    found.setdefault(requirement.name, []).append(versions)
    return {name: ", ".join(sorted(versions)) for name, versions in found.items()}


def _sources(wheel: Path) -> SourceTree:
    """Return the sources in a wheel.

    Raises:
        OSError: it cannot be read.
        zipfile.BadZipFile: it is not a wheel.
    """
    archive = zipfile.ZipFile(wheel)
    names = frozenset(archive.namelist())
    return SourceTree(lambda name: archive.read(name).decode() if name in names else None)


def _wheel(version: str, directory: Path) -> Path:
    """Return the wheel of a version, from ``directory`` or else downloaded to it.

    Raises:
        OSError: it cannot be downloaded.
    """
    directory.mkdir(parents=True, exist_ok=True)
    pattern = f"sglang-{version}-*.whl"
    found = next(directory.glob(pattern), None)
    if found is None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", str(directory), f"sglang=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = next(directory.glob(pattern), None)
        if found is None:
            reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise OSError(f"no wheel of SGLang {version}: {reason}")
    return found


def _count(version: str) -> str:
    imports = {use.name for use in imports_for(version)}
    return f"{len(imports)} imports and {len(seams_of(version))} names"


def _version(text: str) -> str:
    try:
        version_key(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; supported: {supported_text()}") from None
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
