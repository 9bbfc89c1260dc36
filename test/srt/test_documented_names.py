"""What the docs name exists: links, classes, metrics, fields of ``/coserve/status``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_coserve.config import OFFLINE_POLICIES
from sglang_coserve.core.policies import POLICIES
from srt.documentation.blocks import PAGES, ROOT
from srt.own_process import printed_by

CHANGES = ROOT / "CHANGELOG.md"
"""Names what is gone, too."""

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"(?:[a-z]\w*\.)*(?:[A-Z]\w*[a-z]\w*|_[a-z]\w*)(?:\.[a-z]\w*)?")
NOT_OURS = {"DataContext.get_current", "RateLimitError"}

METRIC = re.compile(r"\bcoserve_\w+_(?:total|seconds)\b")


@pytest.mark.parametrize("page", [CHANGES, *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    links = LINK.findall(FENCED.sub("", page.read_text()))
    assert [link for link in links if not leads_somewhere(page, link)] == []


def test_the_index_and_the_site_have_every_page_once() -> None:
    docs = ROOT / "docs"
    linked = LINK.findall((docs / "README.md").read_text())
    within = [link for link in linked if not link.startswith("../")]
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    assert sorted(within) == sorted(pages - {"README.md"})
    site = (docs / "site" / "mkdocs.yml").read_text()
    assert re.findall(r": (\S+\.md)$", site, re.MULTILINE) == ["README.md", *within]


def leads_somewhere(page: Path, link: str) -> bool:
    if "://" in link:
        return True
    path, _, anchor = link.partition("#")
    file = page.parent / path if path else page
    return file.exists() and (not anchor or anchor in anchors(file))


def anchors(page: Path) -> Iterator[str]:
    """Yield the names of a page's headings, as they are made on GitHub."""
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"\]\([^)]*\)", "]", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
        yield f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor
        seen[anchor] += 1


@pytest.fixture(scope="module")
def words() -> set[str]:
    sources = [file for room in ("python", "benchmark") for file in (ROOT / room).rglob("*.py")]
    sources.append(ROOT / "docs" / "examples" / "monitoring" / "alerts.yml")
    return {word for file in sources for word in re.findall(r"\w+", file.read_text())}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_class_that_is_named_is_in_the_sources(page: Path, words: set[str]) -> None:
    """With what it is asked for, as in ``StepPlan.until_s``; private names, too."""
    code = CODE.findall(FENCED.sub("", page.read_text()))
    named = {name for text in code if (name := text.split("(")[0]) and NAME.fullmatch(name)}
    missing = [name for name in named - NOT_OURS if not words.issuperset(name.split("."))]
    assert sorted(missing) == []


@pytest.mark.parametrize(
    ("script", "page"), [("flags", "flags"), ("metrics", "prometheus"), ("routes", "routes")]
)
def test_a_page_that_a_script_makes_is_current(script: str, page: str) -> None:
    """Else: python scripts/reference/SCRIPT_page.py."""
    made = printed_by(f"import {script}_page as script; print(script.page(), end='')")
    assert made == (ROOT / "docs" / f"{page}.md").read_text().splitlines()


def test_metrics_that_pages_mention_are_exported() -> None:
    exported = METRIC.findall((ROOT / "docs" / "prometheus.md").read_text())
    mentioned = {name for page in PAGES for name in METRIC.findall(page.read_text())}
    assert sorted(mentioned.difference(exported)) == []


def test_the_fields_of_kv_checkpoints_are_those_of_the_status() -> None:
    from sglang_coserve.srt.kv_checkpoint.strategies import Eager
    from srt.kv_checkpoint.bare_cache import BareEngine

    engine = BareEngine(Eager(), slots=64, host_slots=64, page_tokens=1)
    named = {*engine.store.figures()}
    table = names_in_table("kv_checkpoint.md", "## Metrics")
    # An ellipsis stands for what the name before it has.
    patterns = [name.replace("…", "[a-z]+") for name in table]
    known = {
        pattern: {name for name in named if re.fullmatch(pattern, name)} for pattern in patterns
    }
    assert [pattern for pattern, names in known.items() if not names] == []
    assert set().union(*known.values()) == named


def test_the_fields_of_moved_kv_are_those_of_the_status() -> None:
    from sglang_coserve.srt.request_moves import COUNTED

    assert names_in_table("pools.md", "## Moved KV") == set(COUNTED)


def test_the_fields_of_safepoints_are_those_of_the_status() -> None:
    from sglang_coserve.srt.safepoint.safepoints import SafepointStats

    section = section_of("safepoints.md", "## Status and metrics")
    report = SafepointStats().report()
    assert set(report) <= set(CODE.findall(section))
    assert set(report["delays_ms"]) == names_in_table("safepoints.md", "## Status")


def test_the_page_of_policies_has_every_policy_and_says_whether_servers_offer_it() -> None:
    rows = [row.split(" | ") for row in section_of("policies.md", "## The policies").splitlines()]
    told = {row[0].strip("| `"): row[1].startswith("yes") for row in rows if row[0].endswith("`")}
    assert told == {name: name in OFFLINE_POLICIES for name in POLICIES}


def section_of(page: str, heading: str) -> str:
    text = (ROOT / "docs" / page).read_text()
    return text[text.index(heading) + len(heading) :].split("\n## ")[0]


def names_in_table(page: str, heading: str) -> set[str]:
    rows = [line.split("|") for line in section_of(page, heading).splitlines() if "|" in line]
    return {name for row in rows for name in CODE.findall(row[1])}
