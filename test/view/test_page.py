"""The document: everything is in it, and nothing else may run."""

from __future__ import annotations

import base64
import hashlib
import re

from sglang_coserve.view.page import Page


def test_only_its_own_script_and_style_may_run() -> None:
    page = Page.assemble()
    policy = page.headers["content-security-policy"]
    html = page.html.decode()
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (text,) = re.findall(rf"<{tag}[^>]*>(.+?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_it_needs_nothing_from_elsewhere_and_writes_no_markup() -> None:
    html = Page.assemble().html.decode()
    assert "innerHTML" not in html
    assert "insertAdjacentHTML" not in html
    addresses = set(re.findall(r"https?://[^\"'\s)]+", html))
    # The name of a namespace, and what one button opens in a tab of its own.
    assert addresses == {"http://www.w3.org/2000/svg", "https://ui.perfetto.dev"}
    assert not re.search(r"\son[a-z]+=", html)
    assert not re.search(r"\sstyle=", html)
