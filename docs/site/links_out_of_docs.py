"""A hook of mkdocs: links to files outside of docs/ lead to the repository."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<=\]\()(\.\./[^)\s]+)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return the page with such links as addresses; those within docs/ stay relative."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def address(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[1]))
        inside = path == "docs" or path.startswith("docs/")
        return link[1] if inside else f"{config.repo_url}/blob/main/{path}"

    return _LINK.sub(address, markdown)
