"""Fetches the images, videos and sounds of requests from allowed sources only.

SGLang 0.5.17 opens whatever a request names, in the process of the HTTP server: any URL,
``file://`` or a path. So anybody who may send a request, or a line of a
batch, could read files of the server and call services that only it can reach (SSRF).
Here the content is fetched before SGLang sees the request, and SGLang gets it inline,
so that its loaders, of which several models have their own, open nothing.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, Final

import httpx

from sglang_coserve.network import OutboundTransport

_MAX_BYTES: Final = 64 << 20
"""Most to fetch for one request, as much as a body with its media inline may have."""

_TIMEOUT_S: Final = 10.0
"""Time limit for one file; SGLang's own loaders wait as long for the next bytes of a video."""

_AT_ONCE: Final = 4
"""Files of one request that are fetched or decoded concurrently, so that one with a thousand does
not hog the server."""

_ITEMS_A_TURN: Final = 256
"""Items after which the event loop has others' turns, where none is waited for."""

_MAX_REDIRECTS: Final = 5
_TYPES: Final = {"image": "image/jpeg", "video": "video/mp4", "audio": "audio/wav"}
"""Media types for content without one; decoders inspect the content anyway."""

_MEDIA_TYPE: Final = re.compile(r"(image|video|audio)/[\w.+-]{1,64}", re.ASCII)
_WORDS: Final = frozenset({"format", "modality", "type"})
"""Keys of an object whose values are metadata, not media."""


class _Fetching:
    """What the files of one request share."""

    def __init__(self) -> None:
        self.turn = asyncio.Semaphore(_AT_ONCE)
        self.left_bytes = _MAX_BYTES


class MediaSources:
    """Replaces the media of requests by their content; with ``allow_urls``, fetches public URLs."""

    def __init__(self, *, allow_urls: bool) -> None:
        self._allow_urls = allow_urls
        # Created once, because loading the certificates takes tens of milliseconds.
        self._transport = OutboundTransport()

    @classmethod
    def named(cls, name: str) -> MediaSources | None:
        """Return the sources for a value of ``--media-sources``; None for "any" (SGLang's way)."""
        return None if name == "any" else cls(allow_urls=name == "public")

    async def bring(self, request: Any) -> None:
        """Replace the media that a ``GenerateReqInput`` or ``EmbeddingReqInput`` refers to.

        Raises:
            ValueError: a source is not allowed, or cannot be fetched.
        """
        fetching = _Fetching()
        for kind in _TYPES:
            name = f"{kind}_data"
            data = getattr(request, name, None)
            if data is not None:
                setattr(request, name, await self._brought(data, kind, fetching))

    async def _brought(self, item: Any, kind: str, fetching: _Fetching) -> Any:
        if isinstance(item, str):
            return await self._content(item, kind, fetching)
        if isinstance(item, list | tuple):
            return await self._all_brought(item, kind, fetching)
        if isinstance(item, Mapping):
            return {
                key: value if key in _WORDS else await self._brought(value, kind, fetching)
                for key, value in item.items()
            }
        if is_dataclass(item) and not isinstance(item, type) and hasattr(item, "url"):
            return replace(item, url=await self._brought(item.url, kind, fetching))
        return item  # Bytes, or a number of what has been processed already.

    async def _all_brought(
        self, items: Sequence[Any], kind: str, fetching: _Fetching
    ) -> Sequence[Any]:
        found = list(items)
        # Of what has been processed already, there may be a million numbers.
        places = [place for place, item in enumerate(found) if not isinstance(item, int | float)]
        rest = iter(places)

        async def bring_rest() -> None:
            for place in rest:
                found[place] = await self._brought(found[place], kind, fetching)
                if place % _ITEMS_A_TURN == 0:
                    await asyncio.sleep(0)

        if places:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in places[:_AT_ONCE]:
                        group.create_task(bring_rest())
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        return found

    async def _content(self, source: str, kind: str, fetching: _Fetching) -> str:
        """Return a ``data:`` URL."""
        scheme = source[:8].lower()
        if scheme.startswith("data:"):
            return "data:" + source[5:]
        if not scheme.startswith(("http://", "https://")):
            async with fetching.turn:
                return await asyncio.to_thread(_inline, source, kind)
        if not self._allow_urls:
            raise ValueError(f"{kind}: send it as a data: URL; this server fetches none")
        async with fetching.turn:
            media_type, content = await self._fetched(source, kind, fetching)
        encoded = await asyncio.to_thread(base64.b64encode, content)
        return f"data:{media_type};base64,{encoded.decode()}"

    async def _fetched(self, url: str, kind: str, fetching: _Fetching) -> tuple[str, bytes]:
        """Fetch ``url``; return the media type and the bytes.

        Raises:
            ValueError: it cannot be fetched.
        """
        # A new client for each file, so that cookies are not shared. Connections belong to the
        # transport, and are closed after each response.
        client = httpx.AsyncClient(
            transport=self._transport,
            # No compression: the decompressed content could be far larger.
            headers={"accept-encoding": "identity"},
            follow_redirects=True,
            max_redirects=_MAX_REDIRECTS,
            trust_env=False,
        )
        source = f"{kind}: {url[:200]!r}"
        try:
            async with (
                asyncio.timeout(_TIMEOUT_S),
                client.stream("GET", url) as response,
            ):
                response.raise_for_status()
                content = bytearray()
                async for chunk in response.aiter_raw():
                    content += chunk
                    fetching.left_bytes -= len(chunk)
                    if fetching.left_bytes < 0:
                        raise ValueError(
                            f"{source} is too large: all files of a request may have "
                            f"{_MAX_BYTES:,} bytes together: send fewer or smaller ones"
                        )
        except TimeoutError:
            raise ValueError(f"{source} did not come within {_TIMEOUT_S:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"{source} cannot be fetched: {reason}") from None
        found = _MEDIA_TYPE.match(response.headers.get("content-type", ""))
        return found[0] if found else _TYPES[kind], bytes(content)


def _inline(source: str, kind: str) -> str:
    """Return bare base64 as a ``data:`` URL, which no loader mistakes for a path."""
    try:
        base64.b64decode(source, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(
            f"{kind}: {source[:64]!r} is neither base64 nor an http(s): or data: URL, and files of "
            "the server are not read"
        ) from None
    return f"data:{_TYPES[kind]};base64,{source}"
