"""Bounds of one body once it is decoded: pixels, seconds, log-probabilities.

A picture of 27 KiB can have 169 million pixels, and two numbers that are within their bounds can
have a product that is not. So sizes are added up over all prompts, choices and files of a body.
"""

from __future__ import annotations

import io
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from PIL import Image

from sglang_coserve.guard import compat

logger = logging.getLogger(__name__)


class Size(NamedTuple):
    """A count that one body has, and its limit."""

    name: str
    most: int
    remedy: str


class Sizes:
    """Counts of one body so far."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, size: Size, count: int) -> None:
        """Add to a size.

        Raises:
            ValueError: the body has more than it may have.
        """
        self._counts[size.name] += count
        if self._counts[size.name] > size.most:
            raise ValueError(
                f"{self._counts[size.name]:,} {size.name}: one request may have {size.most:,} "
                f"together: {size.remedy}"
            )


_OF_BODY: Final[ContextVar[Sizes | None]] = ContextVar(
    "sizes of the body being served", default=None
)


def begin_sizes() -> None:
    """Count the sizes of a new body in this context, and in the tasks that it starts."""
    _OF_BODY.set(Sizes())


def sizes() -> Sizes:
    """Return the sizes of the body that is being served; new ones if there is none."""
    return _OF_BODY.get() or Sizes()


# --- Media ---------------------------------------------------------------------------------------

_SMALLER: Final = "send fewer or smaller ones"

PIXELS: Final = Size("pixels in images", 100_000_000, _SMALLER)
"""Eight photographs of 12 megapixels. Decoded for a model, a pixel takes up to 8 bytes."""

_LEAST_PIXELS: Final = 1 << 18
"""Pixels that an image counts as at least: processors enlarge small ones, to 448 x 448 say."""

VIDEO_PIXELS: Final = Size("pixels in the frames of videos", 2**31, _SMALLER)
"""768 frames of 1080p. SGLang holds the sampled frames in full size, 3 bytes a pixel."""

SECONDS: Final = Size("seconds of sound", 7_200, "send fewer or shorter files")
SAMPLES: Final = Size("samples of sound", 200_000_000, "send fewer or shorter files")
"""An hour at 48 kHz. A sample takes 8 bytes, and sounds are resampled to their seconds."""

_MOST_FRAMES: Final = 768
"""Most frames that SGLang's processors take of a video."""

_FRAMES_PER_S: Final = 8
"""More than any of SGLang's processors takes by itself."""


def measured(kind: str, content: bytes) -> Iterator[tuple[Size, int]]:
    """Yield the sizes that a file of the kind "image", "video" or "audio" has once it is decoded.

    Decodes nothing but headers. A file that cannot be read has no size: SGLang refuses the file.

    Raises:
        ValueError: an image is too large to be opened.
    """
    for measure in _MEASURES[kind]:
        try:
            yield from measure(content)
        except Image.DecompressionBombError as error:
            raise ValueError(f"image: {error}: {_SMALLER}") from None
        except Exception as error:
            logger.debug("no size of this %s: %r", kind, error)


def _image(content: bytes) -> Iterator[tuple[Size, int]]:
    with Image.open(io.BytesIO(content)) as image:
        yield PIXELS, max(image.width * image.height, _LEAST_PIXELS)


def _frames(content: bytes) -> Iterator[tuple[Size, int]]:
    from sglang.srt.utils.video_decoder import VideoDecoderWrapper

    video = VideoDecoderWrapper(content)
    frames = min(len(video), _MOST_FRAMES)
    if video.avg_fps > 0:
        frames = min(frames, int(_FRAMES_PER_S * len(video) / video.avg_fps) + 1)
    height, width = compat.frame_shape(video)
    yield VIDEO_PIXELS, int(frames * height * width)


def _sound(content: bytes) -> Iterator[tuple[Size, int]]:
    import soundfile

    try:
        info = soundfile.info(io.BytesIO(content))
    except soundfile.LibsndfileError:
        yield from _sound_of_container(content)
        return
    yield SECONDS, int(info.duration)
    yield SAMPLES, int(info.frames * info.channels)


def _sound_of_container(content: bytes) -> Iterator[tuple[Size, int]]:
    import av

    # Packets are decoded, whatever a header says of their number.
    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.audio[0]
        seconds = 0.0
        for packet in container.demux(stream):
            seconds += float((packet.duration or 0) * packet.time_base)
        yield SECONDS, int(seconds)
        yield SAMPLES, int(seconds * stream.sample_rate * stream.channels)


_MEASURES: Final[Mapping[str, tuple[Callable[[bytes], Iterator[tuple[Size, int]]], ...]]] = {
    "image": (_image,),
    "video": (_frames, _sound),
    "audio": (_sound,),
}


# --- Log-probabilities ---------------------------------------------------------------------------

_FEWER: Final = (
    "ask for fewer choices (n), tokens (max_new_tokens), positions of the prompt "
    "(logprob_start_len) or tokens at each (top_logprobs_num)"
)

_PROMPT_LOGPROBS: Final = Size("log-probabilities of prompt tokens", 4 << 20, _FEWER)
"""All of a prompt come at once: 4 million take the scheduler 0.15 s and 400 MB."""

_MOST_LOGPROBS: Final = 16 << 20
_LOGPROBS_PER_TOKEN: Final = 32
"""A request for the 20 likeliest tokens may use the whole context, however long."""


def add_logprobs(request: Any, context_tokens: int) -> None:
    """Count the log-probabilities that a tokenized request asks for. O(1).

    Raises:
        ValueError: all prompts and choices of the body together ask for too many.
    """
    if not getattr(request, "return_logprob", False):
        return
    params = request.sampling_params
    prompt_tokens = len(request.input_ids or ())
    start = request.logprob_start_len
    scored = max(0, prompt_tokens - start) if start >= 0 else 0
    room = max(0, context_tokens - prompt_tokens)
    written = room if params.max_new_tokens is None else min(params.max_new_tokens, room)
    of_each = params.n * (1 + request.top_logprobs_num + len(request.token_ids_logprob or ()))
    counted = sizes()
    counted.add(_PROMPT_LOGPROBS, scored * of_each)
    most = max(_MOST_LOGPROBS, _LOGPROBS_PER_TOKEN * context_tokens)
    counted.add(Size("log-probabilities", most, _FEWER), (scored + written) * of_each)
