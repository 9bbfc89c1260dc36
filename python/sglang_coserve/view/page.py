"""The page: one HTML document with its style and its script, and what a browser may do with it."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Final

_STYLE: Final = "<style></style>"
_SCRIPT: Final = '<script type="module"></script>'


@dataclass(frozen=True, slots=True)
class Page:
    """The document, and the headers that belong to it."""

    html: bytes
    headers: dict[str, str]

    @classmethod
    def assemble(cls) -> Page:
        """Put the parts together; they are read from the package."""
        html, style, script = (_read(name) for name in ("page.html", "page.css", "page.js"))
        assert html.count(_STYLE) == html.count(_SCRIPT) == 1
        html = html.replace(_STYLE, f"<style>{style}</style>")
        html = html.replace(_SCRIPT, f'<script type="module">{script}</script>')
        policy = "; ".join(
            (
                "default-src 'none'",
                f"style-src '{_hash(style)}'",
                f"script-src '{_hash(script)}'",
                "connect-src 'self'",
                "img-src data:",
                "base-uri 'none'",
                "form-action 'none'",
                "frame-ancestors 'none'",
            )
        )
        headers = {
            "content-type": "text/html; charset=utf-8",
            "content-security-policy": policy,
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }
        return cls(html.encode(), headers)


def _read(name: str) -> str:
    return resources.files("sglang_coserve.view").joinpath("page", name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
