"""Fetches the images, videos and sounds of requests from allowed sources only.

SGLang opens whatever a request names, in the process of the HTTP server: any URL,
``file://`` or a path. So anybody who may send a request, or a line of a
batch, could read files of the server and call services that only it can reach (SSRF).
Here the content is fetched before SGLang sees the request, and SGLang gets it inline. So SGLang's
loaders open nothing; several models have loaders of their own.

What a file becomes once it is decoded is bounded, too (``sizes``), wherever the file comes from.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, Final

import httpx2
import pybase64

from sglang_coserve.guard.engine_limits import check_options
from sglang_coserve.guard.sizes import PIXELS, Size, Sizes, measured, sizes
from sglang_coserve.network import OutboundTransport

FETCHED: Final = Size("bytes of files to fetch", 64 << 20, "send fewer or smaller ones")
"""The bound of a body whose media are inline."""

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
    """State that the files of one prompt share."""

    def __init__(self) -> None:
        self.turn = asyncio.Semaphore(_AT_ONCE)
        self.sizes = sizes()


class MediaSources:
    """Replaces the media of requests by their content, and measures them.

    ``allow_urls`` is whether public URLs are fetched, ``leaves_names`` whether SGLang opens what
    is named itself.
    """

    def __init__(self, *, allow_urls: bool, leaves_names: bool = False) -> None:
        self._allow_urls = allow_urls
        self._leaves_names = leaves_names
        # Created once, because loading the certificates takes tens of milliseconds.
        self._transport = OutboundTransport()

    @classmethod
    def named(cls, name: str) -> MediaSources:
        """Return the sources for a value of ``--media-sources``."""
        return cls(allow_urls=name == "public", leaves_names=name == "any")

    async def bring(self, request: Any) -> None:
        """Replace the media that a ``GenerateReqInput`` or ``EmbeddingReqInput`` refers to.

        Raises:
            ValueError: a source is not allowed, cannot be fetched, or is too large.
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
        if isinstance(item, bytes):
            async with fetching.turn:
                await self._measure(item, kind, fetching)
            return item
        if isinstance(item, Mapping):
            _check_options(kind, item, fetching.sizes)
            return {
                key: value if key in _WORDS else await self._brought(value, kind, fetching)
                for key, value in item.items()
            }
        if is_dataclass(item) and not isinstance(item, type) and hasattr(item, "url"):
            _check_options(kind, vars(item), fetching.sizes)
            return replace(item, url=await self._brought(item.url, kind, fetching))
        return item  # A number of features that are computed already.

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
        is_data, is_url = scheme.startswith("data:"), scheme.startswith(("http://", "https://"))
        if is_url and not (self._allow_urls or self._leaves_names):
            raise ValueError(f"{kind}: send it as a data: URL; this server fetches none")
        async with fetching.turn:
            if is_url and self._allow_urls:
                media_type, content = await self._fetched(source, kind, fetching)
                encoded = await asyncio.to_thread(base64.b64encode, content)
                source = f"data:{media_type};base64,{encoded.decode()}"
            else:
                head, _, text = source.partition(",") if is_data else ("", "", source)
                decoded = await asyncio.to_thread(_content_of, text)
                if self._leaves_names and not is_data:
                    pass  # A path can look like base64.
                elif decoded is None:
                    raise ValueError(
                        f"{kind}: {source[:64]!r} is neither base64 nor an http(s): or data: URL, "
                        "and files of the server are not read"
                    )
                else:
                    head = f"data:{head[5:]}" if is_data else f"data:{_TYPES[kind]};base64"
                    source = f"{head},{text}"
                content = decoded or b""
            await self._measure(content, kind, fetching)
        return source

    async def _measure(self, content: bytes, kind: str, fetching: _Fetching) -> None:
        for size, count in await asyncio.to_thread(lambda: list(measured(kind, content))):
            fetching.sizes.add(size, count)

    async def _fetched(self, url: str, kind: str, fetching: _Fetching) -> tuple[str, bytes]:
        """Fetch ``url``; return the media type and the bytes.

        Raises:
            ValueError: it cannot be fetched.
        """
        # A new client for each file, so that cookies are not shared. Connections belong to the
        # transport, and are closed after each response.
        client = httpx2.AsyncClient(
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
                    fetching.sizes.add(FETCHED, len(chunk))
        except TimeoutError:
            raise ValueError(f"{source} did not come within {_TIMEOUT_S:g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"{source} cannot be fetched: {reason}") from None
        found = _MEDIA_TYPE.match(response.headers.get("content-type", ""))
        return found[0] if found else _TYPES[kind], bytes(content)


def _content_of(encoded: str) -> bytes | None:
    """Return what base64 says; None if the text is no base64, as SGLang's loaders see it."""
    try:
        return pybase64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return None


def _check_options(kind: str, item: Mapping[str, Any], counts: Sizes) -> None:
    """Check the fields of an image or video beside its source.

    Raises:
        ValueError: an option may not be set, or is out of its bounds.
    """
    if item.get("content_hash") is not None:
        raise ValueError(f"{kind}: content_hash is set by the server only: leave it out")
    if "format" in item:
        return  # Computed features are numbers without bounds.
    check_options(kind, item)
    if kind == "image" and item.get("min_pixels") is not None:
        counts.add(PIXELS, int(item["min_pixels"]))  # A small image is enlarged to so many.
