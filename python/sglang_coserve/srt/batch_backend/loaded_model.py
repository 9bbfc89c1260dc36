"""The fingerprint of the model that SGLang was started with."""

from __future__ import annotations

import json
import logging
import secrets
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from sglang_coserve.core.engine_load import KvFormat
from sglang_coserve.srt import compat
from sglang_coserve.srt.batch_backend.model_fingerprint import fingerprint

__all__ = ["kv_fingerprint", "kv_format", "loaded_fingerprint", "model_in_use"]

logger = logging.getLogger(__name__)

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
