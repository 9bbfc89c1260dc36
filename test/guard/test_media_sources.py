"""Images by URL, by file and inline, with SGLang's own requests and loaders."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from sglang_coserve import network
from sglang_coserve.guard import media_sources
from sglang_coserve.guard.media_sources import FETCHED, MediaSources
from web_server import Call, WebServer, web_server


def picture() -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(content, "PNG")
    return content.getvalue()


PICTURE = picture()
DATA_URL = "data:image/png;base64," + base64.b64encode(PICTURE).decode()


@pytest.fixture
def web() -> Iterator[WebServer]:
    def answer(call: Call) -> None:
        if call.path.startswith("/to/"):
            call.answer(302, location=call.path.removeprefix("/to/"))
            return
        call.send_response(404 if call.path == "/none" else 200)
        call.send_header("content-type", "image/png")
        call.end_headers()
        with suppress(ConnectionError):
            if call.path == "/endless":
                while True:
                    call.wfile.write(bytes(1 << 16))
            for _ in range(100 if call.path == "/slow" else 0):
                call.wfile.write(b"x")
                time.sleep(0.1)
            call.wfile.write(PICTURE)

    with web_server(answer) as web:
        yield web


@pytest.fixture
def as_if_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.1 counts as an address in the internet; what else is private stays so."""
    is_public = network.is_public
    monkeypatch.setattr(network, "is_public", lambda a: a == "127.0.0.1" or is_public(a))


def brought(request: Any, *, allow_urls: bool = True) -> Any:
    asyncio.run(MediaSources(allow_urls=allow_urls).bring(request))
    return request


def asking(**data: Any) -> Any:
    from sglang.srt.managers.io_struct import GenerateReqInput

    return GenerateReqInput(text="what is this?", **data)


def opens(source: Any) -> Any:
    """What SGLang's own loader makes of it."""
    from sglang.srt.utils.common import load_image

    image, _ = load_image(source, False)
    return image.convert("RGB").getpixel((0, 0))


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
@pytest.mark.parametrize(
    "source",
    [
        "{url}/x",
        "{url}/to/http://example.org/",
        "http://localhost:{port}/x",
        "http://[::ffff:127.0.0.1]:{port}/x",
        "http://0x7f.1:{port}/x",
        "HTTP://127.0.0.1:{port}/x",
        "http://169.254.169.254/latest/meta-data/",
        "http://[64:ff9b::7f00:1]/",
        "http://xn--/",
        "http://[::1",
        "file://{file}",
        "FILE://{file}",
        "file:{file}",
        "{file}",
        "ftp://127.0.0.1/x",
        "video:{file}",
        "~/.ssh/id_rsa",
        "../../etc/passwd",
        " {file}",
        "\x00",
    ],
)
def test_nothing_private_is_opened(web: WebServer, tmp_path: Path, kind: str, source: str) -> None:
    path = tmp_path / "private.png"
    path.write_bytes(PICTURE)
    port = web.url.rpartition(":")[2]
    named = source.format(url=web.url, port=port, file=path)
    for item in (named, [named], [[named]], {"url": named}, [{"video": {"path": named}}]):
        with pytest.raises(ValueError, match=rf"^{kind}: "):
            brought(asking(**{f"{kind}_data": item}))
    assert web.calls == []


def test_a_path_that_could_be_base64_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """``/tmp/abcdefg`` is both. SGLang's loaders would look for the file first."""
    request = brought(asking(image_data=["/etc/hostname"[:12]]))
    assert request.image_data[0].startswith("data:")
    with pytest.raises(Exception, match="cannot identify image"):
        opens(request.image_data[0])


def test_what_is_inline_is_shown_to_the_loader(web: WebServer) -> None:
    from sglang.srt.utils.common import ImageData

    bare = base64.b64encode(PICTURE).decode()
    jpeg = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(jpeg, "JPEG")
    # Begins with a slash, which SGLang takes for a path.
    slash = base64.b64encode(jpeg.getvalue()).decode()
    assert slash.startswith("/9j/")
    items = [DATA_URL, "DATA:" + DATA_URL[5:], bare, ImageData(DATA_URL, "high"), PICTURE, slash]
    request = brought(asking(image_data=list(items)), allow_urls=False)
    colours = [opens(item) for item in request.image_data]
    assert colours[:-1] == [(255, 0, 0)] * 5
    assert colours[-1][0] > 250
    assert request.image_data[3].detail == "high"
    assert web.calls == []


def test_what_is_computed_already_is_left_alone() -> None:
    item = {"format": "processor_output", "modality": "IMAGE", "pixel_values": [[1.0, 2.0], [3]]}
    assert brought(asking(image_data=[dict(item)])).image_data == [item]
    assert brought(asking()).image_data is None


STRINGS = 5000
A_TURN = media_sources._AT_ONCE * media_sources._ITEMS_A_TURN


@pytest.mark.parametrize(
    ("item", "least_turns"),
    [
        (["QUJD"] * STRINGS, STRINGS // media_sources._AT_ONCE),
        ([["QUJD"] * 5] * (STRINGS // 5), STRINGS // media_sources._AT_ONCE),
        (["data:,QUJD"] * STRINGS, STRINGS // A_TURN),
        ([{"format": "processor_output", "pixel_values": [0.5] * 30_000}], 0),
        ([{"format": "processor_output", "pixel_values": [[0.5]] * STRINGS}], STRINGS // A_TURN),
    ],
    ids=["base64", "nested", "data", "numbers", "rows"],
)
async def test_others_have_their_turns_beside_a_request_of_many_items(
    item: list[Any], least_turns: int
) -> None:
    turns = most_tasks = 0

    async def other() -> None:
        nonlocal turns, most_tasks
        while True:
            await asyncio.sleep(0)
            turns += 1
            most_tasks = max(most_tasks, len(asyncio.all_tasks()))

    task = asyncio.create_task(other())
    await asyncio.sleep(0)
    request = asking(image_data=item)
    await MediaSources(allow_urls=True).bring(request)
    task.cancel()
    assert len(request.image_data) == len(item)
    assert turns >= least_turns
    # This test, the other, and those of both levels of lists.
    at_once = media_sources._AT_ONCE
    assert most_tasks <= 2 + at_once + at_once**2


@pytest.mark.usefixtures("as_if_public")
class TestPublicAddresses:
    def test_they_are_fetched_once_by_us(self, web: WebServer) -> None:
        urls = [f"{web.url}/{n}" for n in range(9)]
        request = brought(asking(image_data=[*urls, f"{web.url}/to/{web.url}/moved"]))
        assert request.image_data == [DATA_URL] * 10
        assert [opens(item) for item in request.image_data] == [(255, 0, 0)] * 10
        assert sorted(call.path for call in web.calls)[:9] == [f"/{n}" for n in range(9)]
        assert len(web.calls) == 11

    def test_a_redirect_into_a_private_network_is_not_followed(self, web: WebServer) -> None:
        port = web.url.rpartition(":")[2]
        for target in (f"http://127.0.0.2:{port}/x", "http://10.0.0.1/", "file:///etc/passwd"):
            with pytest.raises(ValueError, match="cannot be fetched"):
                brought(asking(image_data=[f"{web.url}/to/{target}"]))
        assert all(call.path.startswith("/to/") for call in web.calls)

    async def test_a_name_that_changes_its_address_is_looked_up_once(
        self, web: WebServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """DNS rebinding: what was checked is what is connected to."""
        answers = ["127.0.0.1", "127.0.0.2"]
        loop = asyncio.get_running_loop()
        look_up = loop.getaddrinfo

        async def changing(host: str, *args: Any, **kwargs: Any) -> Any:
            if host == "rebinding.example":
                return [(2, 1, 6, "", (answers.pop(0), 0))]
            return await look_up(host, *args, **kwargs)

        monkeypatch.setattr(loop, "getaddrinfo", changing)
        url = web.url.replace("127.0.0.1", "rebinding.example")
        request = asking(image_data=[f"{url}/x"])
        await MediaSources(allow_urls=True).bring(request)
        assert request.image_data == [DATA_URL]
        with pytest.raises(ValueError, match="private"):
            await MediaSources(allow_urls=True).bring(asking(image_data=[f"{url}/x"]))

    def test_what_is_too_long_or_too_slow_is_given_up(
        self, web: WebServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(media_sources, "_TIMEOUT_S", 0.5)
        monkeypatch.setattr(media_sources, "FETCHED", FETCHED._replace(most=1 << 20))
        for path, reason in (
            ("endless", "one request may have 1,048,576"),
            ("slow", "did not come within 0.5 s"),
            ("none", "404"),
            ("to//to//to//to//to//to//to/x", "redirects|cannot be fetched"),
        ):
            with pytest.raises(ValueError, match=reason):
                brought(asking(video_data=[f"{web.url}/{path}"]))

    def test_all_files_of_a_request_share_one_limit(
        self, web: WebServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        most = 3 * len(PICTURE)
        monkeypatch.setattr(media_sources, "FETCHED", FETCHED._replace(most=most))
        urls = [f"{web.url}/{n}" for n in range(4)]
        assert brought(asking(image_data=urls[:3])).image_data == [DATA_URL] * 3
        for data in ({"image_data": urls}, {"image_data": urls[:2], "video_data": urls[2:]}):
            with pytest.raises(ValueError, match=r"bytes .* together: send fewer or smaller"):
                brought(asking(**data))

    async def test_with_one_that_cannot_be_fetched_nothing_more_is(self, web: WebServer) -> None:
        urls = [f"{web.url}/none", *[f"{web.url}/slow"] * 9]
        with pytest.raises(ValueError, match="404"):
            await MediaSources(allow_urls=True).bring(asking(image_data=[urls]))
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert len(web.calls) <= 4

    def test_inline_is_inline(self, web: WebServer) -> None:
        with pytest.raises(ValueError, match="data: URL; this server fetches none"):
            brought(asking(image_data=[f"{web.url}/x"]), allow_urls=False)
        assert web.calls == []


@pytest.mark.parametrize("allowed", ["inline", "public", "any"])
@pytest.mark.parametrize("has_processor", [True, False])
async def test_the_tokenizer_manager_gets_nothing_to_open(
    web: WebServer, monkeypatch: pytest.MonkeyPatch, allowed: str, has_processor: bool
) -> None:
    """Every door of the server and the lines of batches come by here, just before SGLang's
    processors of media."""
    from sglang.srt.managers import tokenizer_manager as stock

    from sglang_coserve.srt.tokenizer.tokenizer_manager import CoserveTokenizerManager

    seen: list[Any] = []

    async def tokenize(_: object, request: Any) -> None:
        seen.append(request.image_data)

    monkeypatch.setattr(stock.TokenizerManager, "_tokenize_one_request", tokenize)
    # Without an engine: what its making sets is set here.
    limits = SimpleNamespace(limit_mm_data_per_request=None)
    monkeypatch.setattr(stock, "get_mm", lambda: limits, raising=False)  # Since SGLang 0.5.23.
    manager = CoserveTokenizerManager.__new__(CoserveTokenizerManager)
    manager._media = MediaSources.named(allowed)
    manager._grammar_trials = None
    manager.mm_processor = object() if has_processor else None
    manager.server_args = limits
    url = f"{web.url}/x"
    await manager._tokenize_one_request(asking(image_data=DATA_URL))
    if has_processor and allowed != "any":
        with pytest.raises(ValueError, match=r"^image: "):
            await manager._tokenize_one_request(asking(image_data=[url]))
        assert seen == [DATA_URL]
    else:
        await manager._tokenize_one_request(asking(image_data=[url]))
        assert seen == [DATA_URL, [url]]
    assert web.calls == []
