"""The model that SGLang was started with, identified by its content. Without SGLang or torch.

Two different models at the same path have different fingerprints; a copy of a model with
other file times has the same. Output generated under one fingerprint must not be continued under
another.

Small files are hashed as a whole. Of a weights file, the names and shapes and up to
three pages of each tensor are hashed, so further training is detected, but the change
of a single number elsewhere is not. At most 512 pages are read of a file: for 70 billion
parameters in 30 files that is about 2,200 reads, 9 MB.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from sglang_coserve.http_lines.engine_load import KvFormat
from sglang_coserve.srt import compat

logger = logging.getLogger(__name__)

_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_OTHERS: Final = frozenset({".json", ".model", ".txt", ".jinja", ".tiktoken", ".py", ".yaml"})
"""Suffixes of configuration and tokenizer files; not of pictures or a read-me."""

_WHOLE_BYTES: Final = 64 << 20
"""Files larger than this, which no tokenizer file is, are sampled."""

_PAGE_BYTES: Final = 4096
"""The smallest unit that a disk reads."""

_MAX_PAGES: Final = 512
_MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors format."""

_THREADS: Final = 8
"""Concurrent reads, for file systems with latencies of milliseconds."""


def fingerprint(paths: Sequence[Path], settings: Mapping[str, object]) -> str:
    """Return a hash, 32 hexadecimal digits, of the files at ``paths`` and of ``settings``.

    A path is a file or a directory, of which only the files directly in it count. ``settings``
    must be convertible to JSON.

    Raises:
        OSError: a file cannot be read, or a directory holds no weights or configuration.
    """
    digest = blake2b(digest_size=16)
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    with ThreadPoolExecutor(_THREADS) as threads:
        for path in paths:
            files = _files(path)
            if not files:
                raise FileNotFoundError(2, "no files of a model are there", str(path))
            for file, content in zip(files, threads.map(_digest, files), strict=True):
                digest.update(b"%d:%s" % (len(file.name), file.name.encode()) + content)
            digest.update(b"end")
    return digest.hexdigest()


def sampled_ranges(file: Path) -> list[tuple[int, int]]:
    """Return the byte ranges (start, end) of a weights file that are hashed.

    Raises:
        OSError: it cannot be read.
    """
    size_bytes = file.stat().st_size
    if file.suffix == ".safetensors":
        header = _safetensors_header(file, size_bytes)
        if header is not None:
            start, tensors = header
            return [(0, start), *_pages_of(start, size_bytes, tensors)]
    return list(_spread(0, size_bytes, _MAX_PAGES))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    wanted = _WEIGHTS | _OTHERS
    return sorted(file for file in path.iterdir() if file.suffix in wanted and file.is_file())


def _digest(file: Path) -> bytes:
    digest = blake2b(digest_size=16)
    with file.open("rb", buffering=0) as source:
        size_bytes = os.fstat(source.fileno()).st_size
        digest.update(size_bytes.to_bytes(8, "little"))
        is_whole = file.suffix not in _WEIGHTS and size_bytes <= _WHOLE_BYTES
        for start, end in [(0, size_bytes)] if is_whole else sampled_ranges(file):
            digest.update(os.pread(source.fileno(), end - start, start))
    return digest.digest()


def _safetensors_header(file: Path, size_bytes: int) -> tuple[int, list[tuple[int, int]]] | None:
    """Return the offset of the data and the ranges of the tensors in it; None if malformed."""
    with file.open("rb") as source:
        length = int.from_bytes(source.read(8), "little")
        if not 0 < length <= min(_MAX_HEADER_BYTES, size_bytes):
            return None
        try:
            entries: dict[str, Any] = json.loads(source.read(length))
            tensors = sorted(
                (int(entry["data_offsets"][0]), int(entry["data_offsets"][1]))
                for name, entry in entries.items()
                if name != "__metadata__"
            )
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return None
    return 8 + length, tensors


def _pages_of(
    start: int, size_bytes: int, tensors: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Yield up to three pages of each tensor; with very many tensors one, or one of every few."""
    each = max(1, min(3, _MAX_PAGES // max(1, len(tensors))))
    step = -(-len(tensors) * each // _MAX_PAGES) or 1
    for first, last in tensors[::step]:
        yield from _spread(start + first, min(start + last, size_bytes), each)


def _spread(start: int, end: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield up to ``count`` pages from ``start`` to ``end``, the last one at the end."""
    if end - start <= count * _PAGE_BYTES:
        if end > start:
            yield start, end
        return
    room = end - start - _PAGE_BYTES
    for number in range(count):
        begin = start + room * number // max(1, count - 1)
        yield begin, begin + _PAGE_BYTES


_SETTINGS: Final = (
    *("dtype", "quantization", "kv_cache_dtype", "json_model_override_args"),
    *("tp_size", "ep_size", "device", "load_format", "enable_deterministic_inference"),
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    *("tokenizer_mode", "tokenizer_backend", "chat_template", "completion_template"),
)
"""Settings that change numerical results or the rendering of prompts."""


def loaded_fingerprint(server_args: Any) -> str:
    """Return the fingerprint of the model, tokenizer and adapters named in ``server_args``.

    Blocks while it reads files. If they cannot be read (e.g. in object storage), the model
    cannot be identified, and the value is random, so a new one at every start.
    """
    settings = {
        name: getattr(server_args, name) for name in (*_SETTINGS, *compat.own_number_settings())
    }
    adapters = [(ref.lora_name, ref.lora_path) for ref in server_args.lora_paths or ()]
    settings["adapters"] = [name for name, _ in adapters]
    places = [server_args.model_path, server_args.tokenizer_path, *(path for _, path in adapters)]
    places += [name for name in (server_args.chat_template,) if name and Path(name).is_file()]
    try:
        paths = [_local(str(name), server_args) for name in dict.fromkeys(places) if name]
        return fingerprint(paths, settings)
    except Exception as error:
        logger.warning(
            "the files of %s cannot be read (%s): half-done lines of batches start over after"
            " every restart, since their model could be another one",
            *(server_args.model_path, error),
        )
        return secrets.token_hex(16)


def model_in_use(manager: Any, loaded: str) -> str:
    """Return what tokens belong to: the model ``loaded`` at the start, with its later weights.

    ``manager`` is the tokenizer manager.
    """
    # Not from the server's arguments: those stay what they were at the start.
    version = manager.config_value("weight_version") or ""
    updates = manager.coserve_weights.name
    return "|".join(filter(None, (loaded, str(version), updates)))


def model_names(manager: Any) -> tuple[str, ...]:
    """Return what requests may ask for: the model's name, and then its adapters'.

    With ``--max-loaded-loras`` SGLang loads an adapter again when a request asks for the adapter.
    """
    if compat.settings_of(manager.server_args).max_loaded_loras is None:
        adapters = manager.lora_registry.get_all_adapters()
    else:
        adapters = manager.lora_ref_cache
    return (str(manager.served_model_name), *adapters)


def kv_format(server_args: Any) -> KvFormat:
    """Return what KV looks like under these settings in effect."""
    return KvFormat(
        dtype=str(server_args.dtype),
        kv_cache_dtype=str(server_args.kv_cache_dtype),
        quantization=server_args.quantization,
        tp_size=server_args.tp_size,
        pp_size=server_args.pp_size,
        page_size=server_args.page_size or 1,
    )


def kv_in_use(manager: Any, loaded: str) -> str:
    """Return the fingerprint of the KV of ``model_in_use``."""
    kv = kv_format(compat.settings_of(manager.server_args))
    return kv_fingerprint(model_in_use(manager, loaded), kv)


def kv_fingerprint(model: str, kv: KvFormat) -> str:
    """Return 32 hexadecimal digits for the KV of a model in use."""
    text = json.dumps([model, kv.model_dump()], sort_keys=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _local(name: str, server_args: Any) -> Path:
    """Return where the files of a path or a name on the Hugging Face hub are."""
    path = Path(name)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    is_model = name == server_args.model_path
    return Path(
        snapshot_download(
            name,
            revision=server_args.revision if is_model else None,
            cache_dir=server_args.download_dir,
            local_files_only=True,
        )
    )
