"""What a body may become once it is decoded, with real files and SGLang's own loaders."""

from __future__ import annotations

import asyncio
import base64
import io
import wave
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.utils.common import ImageData, VideoData

from sglang_coserve.errors import RequestError
from sglang_coserve.guard import sizes
from sglang_coserve.guard.engine_limits import check_request
from sglang_coserve.guard.media_sources import MediaSources


def picture(side: int, kind: str = "PNG") -> bytes:
    content = io.BytesIO()
    Image.new("1", (side, side)).save(content, kind)
    return content.getvalue()


def sound(rate: int, seconds: int) -> bytes:
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(1)
        file.setframerate(rate)
        file.writeframes(bytes(rate * seconds))
    return content.getvalue()


def url(content: bytes) -> str:
    return "data:x;base64," + base64.b64encode(content).decode()


def bring(*requests: Any, named: str = "inline") -> None:
    async def all_of_a_body() -> None:
        sizes.begin_sizes()
        for request in requests:
            await MediaSources.named(named).bring(request)

    asyncio.run(all_of_a_body())


def asking(**fields: Any) -> Any:
    return GenerateReqInput(text="what is this?", **fields)


@pytest.mark.parametrize("named", ["inline", "public", "any"])
def test_pixels_are_counted_before_they_are_decoded(named: str) -> None:
    content = picture(9_000)
    assert len(content) < 20_000
    for item in (url(content), ImageData(url(content)), {"url": url(content)}, content):
        bring(asking(image_data=[item]), named=named)
        with pytest.raises(ValueError, match=r"162,000,000 pixels in images: .* 100,000,000 tog"):
            bring(asking(image_data=[item] * 2), named=named)
    bare = base64.b64encode(content).decode()
    with pytest.raises(ValueError, match="pixels in images"):
        bring(asking(image_data=[bare, bare]), named=named)


def test_small_images_count_as_what_they_are_enlarged_to() -> None:
    small = url(picture(9))
    bring(asking(image_data=[small] * 381))
    with pytest.raises(ValueError, match="pixels in images"):
        bring(asking(image_data=[small] * 382))
    enlarged = {"url": small, "min_pixels": 60_000_000}
    bring(asking(image_data=[enlarged]))
    with pytest.raises(ValueError, match="pixels in images"):
        bring(asking(image_data=[enlarged] * 2))


def test_all_prompts_of_a_body_are_counted_together() -> None:
    prompts = [asking(image_data=[url(picture(9_000))]) for _ in range(2)]
    with pytest.raises(ValueError, match="pixels in images"):
        bring(*prompts)
    bring(prompts[0])
    bring(prompts[1])


def test_an_image_that_pillow_does_not_open_is_refused() -> None:
    with pytest.raises(ValueError, match=r"image: .*decompression bomb"):
        bring(asking(image_data=[url(picture(14_000))]))


def test_what_is_no_base64_is_refused_as_no_loader_may_see_other_bytes() -> None:
    content = url(picture(9))
    for wrong in (content + "\n", content.replace("base64,", "base64,,"), "data:x,<svg>"):
        with pytest.raises(ValueError, match=r"image: .* is neither base64"):
            bring(asking(image_data=[wrong]))


def test_sounds_are_counted_in_seconds_and_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    bring(asking(audio_data=[url(sound(8_000, 2))]))
    # A file of 8 kB that is resampled to 128 million samples.
    with pytest.raises(ValueError, match="8,000 seconds of sound"):
        bring(asking(audio_data=[sound(1, 8_000)]))
    monkeypatch.setattr(sizes, "SAMPLES", sizes.SAMPLES._replace(most=15_000))
    with pytest.raises(ValueError, match="16,000 samples of sound"):
        bring(asking(audio_data=[url(sound(8_000, 2))]))


@pytest.mark.parametrize("field", ["audio_data", "video_data"])
def test_sounds_in_containers_are_counted(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    av = pytest.importorskip("av", reason="SGLang for GPUs brings PyAV")
    content = io.BytesIO()
    with av.open(content, "w", "mp4") as container:
        stream = container.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame(format="fltp", layout="mono", samples=16_000)
        frame.sample_rate = 16_000
        for plane in frame.planes:
            plane.update(bytes(plane.buffer_size))
        for _ in range(5):
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    bring(asking(**{field: [url(content.getvalue())]}))
    monkeypatch.setattr(sizes, "SECONDS", sizes.SECONDS._replace(most=4))
    with pytest.raises(ValueError, match="5 seconds of sound"):
        bring(asking(**{field: [url(content.getvalue())]}))


def test_videos_are_counted_in_pixels_of_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.utils import video_decoder

    class Video:
        """A decoder's view of a file: no decoder is installed where these tests run."""

        frame_shape = (4_320, 7_680)

        def __init__(self, content: bytes) -> None:
            self.num_frames, self.avg_fps = map(int, content.split())

        def __len__(self) -> int:
            return self.num_frames

    monkeypatch.setattr(video_decoder, "VideoDecoderWrapper", Video)
    for frames in (b"440 60", b"64 0"):
        bring(asking(video_data=[url(frames)]))
    for frames in (b"480 30", b"100000 60", b"65 0", b"1000 1"):
        with pytest.raises(ValueError, match="pixels in the frames of videos"):
            bring(asking(video_data=[url(frames)]))


@pytest.mark.parametrize(
    "options",
    [
        {"fps": 60},
        {"max_frames": 10**6},
        {"min_pixels": 1e12},
        {"size": {"height": 10**9}},
        {"size": [{"x": float("nan")}]},
    ],
)
def test_options_of_media_processors_are_bounded(options: dict[str, Any]) -> None:
    for name in ("video_config", "images_config", "mm_processor_kwargs"):
        check_request(asking(**{name: {"fps": 2, "max_pixels": 12_845_056, "mode": "tiny"}}))
        with pytest.raises(RequestError, match="use a"):
            check_request(asking(**{name: options}))
    files = (VideoData(url(b"1 1"), preprocess_kwargs=options), {"url": url(b"1 1"), **options})
    for file in files:
        with pytest.raises(RequestError, match="use a"):
            bring(asking(video_data=[file]))


def test_a_file_has_no_options_of_the_servers() -> None:
    image = ImageData(url(picture(9)))
    image.content_hash = "x"  # SGLang 0.5.17 has no such field.
    for item in (image, {"content_hash": "x", "url": "x"}):
        with pytest.raises(ValueError, match="content_hash is set by the server only"):
            bring(asking(image_data=[item]))
    with pytest.raises(RequestError, match="max_dynamic_patch is 1000000"):
        bring(asking(image_data=[ImageData(url(picture(9)), max_dynamic_patch=10**6)]))


def tokenized(prompt_tokens: int, **fields: Any) -> Any:
    params = {name: fields.pop(name, default) for name, default in (("n", 1), ("new", 1))}
    sampling = SimpleNamespace(n=params["n"], max_new_tokens=params["new"])
    asked = {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 0}
    asked |= {"token_ids_logprob": None, **fields}
    return SimpleNamespace(input_ids=range(prompt_tokens), sampling_params=sampling, **asked)


CONTEXT = 131_072


@pytest.mark.parametrize(
    ("request_", "is_served"),
    [
        # As OpenAI's clients ask: the 20 likeliest tokens, with the rest of the context.
        (tokenized(100, top_logprobs_num=20, new=None), True),
        (tokenized(100, top_logprobs_num=20, new=None, n=4), True),
        (tokenized(100, top_logprobs_num=20, new=None, n=128), False),
        (tokenized(4_000, top_logprobs_num=900, logprob_start_len=0), True),
        (tokenized(4_000, top_logprobs_num=900, logprob_start_len=0, n=2), False),
        (tokenized(120_000, top_logprobs_num=900, logprob_start_len=0), False),
        (tokenized(120_000, top_logprobs_num=900, logprob_start_len=119_000), True),
        (tokenized(120_000, top_logprobs_num=900), True),
        (tokenized(120_000, token_ids_logprob=[1] * 900, logprob_start_len=0), False),
        (tokenized(120_000, top_logprobs_num=900, logprob_start_len=0, return_logprob=False), True),
        (tokenized(9, top_logprobs_num=1_024, new=CONTEXT), False),
    ],
)
def test_log_probabilities_are_bounded_as_a_product(request_: Any, is_served: bool) -> None:
    if is_served:
        sizes.add_logprobs(request_, CONTEXT)
        return
    with pytest.raises(ValueError, match=r"log-probabilities.*: ask for fewer choices"):
        sizes.add_logprobs(request_, CONTEXT)


def test_all_prompts_of_a_body_ask_for_log_probabilities_together() -> None:
    one = tokenized(4_000, top_logprobs_num=900, logprob_start_len=0)

    async def body() -> None:
        sizes.begin_sizes()
        sizes.add_logprobs(one, CONTEXT)
        with pytest.raises(ValueError, match="log-probabilities of prompt tokens"):
            await asyncio.create_task(another())

    async def another() -> None:
        sizes.add_logprobs(one, CONTEXT)

    asyncio.run(body())
