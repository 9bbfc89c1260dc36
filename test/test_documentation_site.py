"""The documentation as a site: it builds without warnings, and shows what GitHub shows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

pytestmark = pytest.mark.heavy

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [page.relative_to(DOCS) for page in sorted(DOCS.rglob("*.md"))]
TAGS = {"h1", "h2", "h3", "img", "li", "ol", "pre", "table", "td", "tr", "ul"}


class Elements(HTMLParser):
    """Counts the elements of a text, or of the article of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._is_inside = "<article" not in text
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._is_inside |= tag == "article"
        if self._is_inside and tag in TAGS:
            self.counts[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        self._is_inside &= tag != "article"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    command += ["-f", str(DOCS / "site" / "mkdocs.yml"), "-d", str(directory)]
    done = subprocess.run(
        command,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return directory


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_has_the_same_parts_as_on_github(site: Path, page: Path) -> None:
    """Where indents differ, Python's Markdown makes other lists and blocks than CommonMark."""
    name = page.parent if page.stem == "README" else page.with_suffix("")
    shown = Elements((site / name / "index.html").read_text()).counts
    markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
    assert shown == Elements(markdown.render((DOCS / page).read_text())).counts


def test_links_out_of_the_docs_lead_to_the_repository(site: Path) -> None:
    page = (site / "papers" / "index.html").read_text()
    assert 'href="https://github.com/sglang-coserve/sglang-coserve/blob/main/benchmark/' in page


def test_every_picture_is_on_a_page() -> None:
    pages = [DOCS.parent / "README.md", *(DOCS / page for page in PAGES)]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    unused = [one.name for one in (DOCS / "images").iterdir() if f"images/{one.name})" not in text]
    assert not unused
