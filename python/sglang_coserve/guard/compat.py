"""What the guard must ask of the installed SGLang, because its versions differ there.

The guard imports nothing of co-serving; what depends on the version elsewhere is in ``srt.compat``.
"""

from __future__ import annotations

from typing import Any


def frame_shape(video: Any) -> tuple[int, int]:
    """Return the height and the width of the frames of a ``VideoDecoderWrapper``, in pixels.

    One that does not know the shape of its frames (SGLang 0.5.17) decodes the first.
    """
    shape = getattr(video, "frame_shape", None) or video[0].shape
    return int(shape[0]), int(shape[1])


def end_of_stream(parser: type) -> Any:
    """Return a parser's method that reads what is left at the end of a stream.

    None where a parser reads every chunk at once (SGLang 0.5.17), and has no such method.
    """
    name = _end_of_stream(parser)
    return None if name is None else getattr(parser, name)


def replace_end_of_stream(parser: type, method: Any) -> None:
    """Let ``method`` take the place of the method that ``end_of_stream`` has found."""
    name = _end_of_stream(parser)
    assert name is not None
    setattr(parser, name, method)


def _end_of_stream(parser: type) -> str | None:
    names = ("parse_stream_end", "finish")
    return next((name for name in names if hasattr(parser, name)), None)
