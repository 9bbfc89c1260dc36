"""Flags in the docs are flags of a program here, and every flag of the server is in the docs."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from srt.documentation.blocks import ROOT

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![\w*])")


def flags_in(*files: Path) -> set[str]:
    return {flag for file in files for flag in FLAG.findall(file.read_text())}


def documented() -> set[str]:
    return flags_in(ROOT / "README.md", *(ROOT / "docs").glob("*.md"))


def flags_of_server() -> set[str]:
    from sglang_coserve.config import CoserveConfig

    parser = argparse.ArgumentParser(add_help=False)
    CoserveConfig.add_cli_args(parser)
    return options_of(parser)


def flags_of_gateway() -> set[str]:
    from sglang_coserve.config.flags import add_flags
    from sglang_coserve.fleet.options import GatewayOptions

    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser, fields(GatewayOptions))
    return options_of(parser)


def flags_of_sglang() -> set[str]:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return options_of(parser)


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return set(parser._option_string_actions)


def flags_of_bench_serving() -> set[str]:
    """SGLang's, whose parser no function returns."""
    from sglang.benchmark import serving

    return set(re.findall(r'"(--[a-z][a-z0-9-]*)"', Path(serving.__file__).read_text()))


def flags_of_coserve() -> dict[str, set[str]]:
    """Of each of its commands."""
    from typer.main import get_command

    from sglang_coserve.cli import app

    found: dict[str, set[str]] = {}

    def add(name: str, command: Any) -> None:
        found[name] = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
        for below, further in getattr(command, "commands", {}).items():
            add(f"{name} {below}".strip(), further)

    add("", get_command(app))
    return found


def flags_of_scripts() -> set[str]:
    """By their source: they have parsers of many kinds."""
    python = [
        file for name in ("benchmark", "python", "scripts") for file in (ROOT / name).rglob("*.py")
    ]
    shell = [file for file in (ROOT / "scripts").iterdir() if file.is_file()]
    declared = re.compile(r"""["'](--[a-z][a-z0-9-]*)["']""")
    found = {flag for file in python for flag in declared.findall(file.read_text())}
    return found | flags_in(*shell)


def flags_of_other_versions() -> set[str]:
    """Those of SGLang that are refused, whether the installed version has them or not."""
    return flags_in(ROOT / "python/sglang_coserve/srt/compat/settings.py")


def flags_of_routers() -> set[str]:
    """Those that routers are started with in their tests."""
    return flags_in(ROOT / "test/srt/test_routers.py")


def flags_of_curl() -> set[str]:
    """Those that the docs use."""
    return {"--retry", "--retry-all-errors", "--retry-delay"}


def test_every_flag_in_the_docs_exists() -> None:
    known = flags_of_server() | flags_of_gateway() | flags_of_sglang() | flags_of_scripts()
    known |= flags_of_bench_serving() | flags_of_other_versions() | flags_of_routers()
    known = known.union(flags_of_curl(), *flags_of_coserve().values())
    assert sorted(documented() - known) == []


def test_every_flag_of_the_server_is_in_the_docs() -> None:
    assert sorted(flags_of_server() - documented()) == []
