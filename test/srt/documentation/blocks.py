"""The fenced blocks of the documentation, the commands in them, and one who types them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[3]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(
        page
        for page in (ROOT / "docs").rglob("*.md")
        if not page.is_relative_to(ROOT / "docs/site")
    ),
    ROOT / "benchmark" / "paper" / "README.md",
]
SHELLS = {"sh", "bash", "console"}

MARK = re.compile(r"<!-- (not run|not run from here on|server): (\S.*?) -->")
SEPARATORS = {"|", "||", "&&", "&", ";", "(", ")"}
SHELL = ("bash", "-euo", "pipefail", "-c")
GIVE_UP_S = 300


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: Path
    line: int
    language: str
    text: str
    mark: str | None
    """``not run`` or ``server``, and None."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_shell(self) -> bool:
        return self.language in SHELLS

    @property
    def script(self) -> str:
        """What is typed: of a console, without prompts and without what is answered."""
        if self.language != "console":
            return self.text
        typed, goes_on = [], False
        for line in self.text.splitlines():
            if goes_on or line.startswith("$ "):
                typed.append(line if goes_on else line[2:])
                goes_on = line.endswith("\\")
        return "\n".join(typed) + "\n"

    def commands(self) -> Iterator[list[str]]:
        """The words of each command, without what it is assigned, fed or sent to."""
        words: list[str] = []
        text = self.script.replace("\\\n", " ").replace("\n", "\n;\n")
        # A quoted text may go over several lines.
        text = re.sub(r"'[^']*'", lambda quoted: quoted[0].replace("\n;\n", "\n"), text)
        text = re.sub(r"\$\([^)]*\)", "PRINTED", text)
        lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        for word in [*lexer, ";"]:
            if word not in SEPARATORS:
                words.append(word)
            elif words:
                yield words
                words = []


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order, each with the mark in the comment before it."""
    found, mark, for_all = [], None, None
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        if token.type == "html_block" and (said := MARK.fullmatch(token.content.strip())):
            mark = said[1]
            if mark == "not run from here on":
                mark = for_all = "not run"
        elif token.type == "fence":
            line, language = token.map[0] + 1, token.info.strip()
            found.append(Block(page, line, language, token.content, mark or for_all))
            mark = None
    return found


def environment() -> dict[str, str]:
    """This one, with the commands that are installed beside Python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path}


@dataclass(frozen=True)
class Reader:
    """One who types what a page says, in a directory of the page's own."""

    base_url: str
    directory: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def follow(self, block: Block) -> None:
        script = block.script
        for documented in ("http://127.0.0.1:30000", "localhost:30000"):
            script = script.replace(documented, self.base_url)
        command = (sys.executable, "-c") if block.language == "python" else SHELL
        done = subprocess.run(
            [*command, script],
            cwd=self.directory,
            env={**environment(), **self.variables},
            capture_output=True,
            text=True,
            timeout=GIVE_UP_S,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        assert '"error"' not in done.stdout or '"error":null' in done.stdout, done.stdout
