"""The decision on every field of SGLang's requests: who may set it, and to what.

SGLang adds fields with each version, and some let a client end or mislead the scheduler. A field
that is not in these tables is refused, and ``test/guard/test_request_fields.py`` fails until it is
in one. A name that an SGLang version does not have does no harm here.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from sglang_coserve.number_bounds import Bound


class Rule(Enum):
    """Rule for a field that has no bounds."""

    PLAIN = "any value that the scheduler can decode"
    CHECKED = "has a check of its own in the guard"
    SERVER = "set by the server only"
    """A client may not set the field. SGLang's own handlers may."""

    REFUSED = "not co-served"


_INT32: Final = 2**31 - 1
_WHOLE: Final = Bound(0, _INT32, is_whole=True)

MOST_LOGPROBS: Final = 1024
"""Log-probabilities of one position: each becomes a Python object in three processes, while other
requests wait."""

_TILES: Final = Bound(1, 128, is_whole=True)
"""Tiles of a picture, each as costly as a small picture; SGLang's models have 12 by themselves."""

OPTION: Final = Bound(-1e8, 1e8)
"""An option of a media processor that has no bound of its own. The largest ones are pixels."""

OPTIONS: Final[Mapping[str, Bound]] = {
    # ``sizes`` counts so many frames.
    "fps": Bound(0, 8),
    **dict.fromkeys(("min_frames", "max_frames", "num_frames"), Bound(0, 768, is_whole=True)),
    "max_tokens_per_frame": Bound(1, 16384, is_whole=True),
    "max_image_tokens": Bound(1, 16384, is_whole=True),
    "max_long_side_pixel": Bound(1, 16384, is_whole=True),
    "max_dynamic_patch": _TILES,
}
"""Options of media processors, for a request or for one file."""

PARAMS: Final[Mapping[str, Bound | Rule]] = {
    # As 32-bit floats, smaller values become zero and larger ones may become infinite.
    "temperature": Bound(0, 1e9),
    "top_p": Bound(1.2e-38, 1),
    "min_p": Bound(0, 1),
    "frequency_penalty": Bound(-2, 2),
    "presence_penalty": Bound(-2, 2),
    # Logits are divided by it, and must stay finite.
    "repetition_penalty": Bound(1e-3, 2),
    # The engine's integers have 32 bits, and 64 for the seed.
    "top_k": Bound(-1, _INT32, is_whole=True),
    "min_new_tokens": _WHOLE,
    "max_new_tokens": _WHOLE,
    "sampling_seed": Bound(-(2**63), 2**63 - 1, is_whole=True),
    # Output tokens are counted modulo this.
    "stream_interval": Bound(1, _INT32, is_whole=True),
    # The limit of OpenAI; SGLang holds all choices at once.
    "n": Bound(1, 128, is_whole=True),
    **dict.fromkeys(
        (
            *("beam_width", "stop", "stop_regex", "stop_token_ids", "logit_bias", "custom_params"),
            *("json_schema", "regex", "ebnf", "structural_tag"),
        ),
        Rule.CHECKED,
    ),
    **dict.fromkeys(
        (
            *("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"),
            *("no_stop_trim", "watermark"),
        ),
        Rule.PLAIN,
    ),
    **dict.fromkeys(
        (
            *("is_normalized", "stop_strs", "stop_str_max_len", "stop_regex_strs"),
            *("stop_regex_max_len", "ebnf_full_assistant"),
        ),
        Rule.SERVER,
    ),
}
"""Sampling parameters, under SGLang's names."""

FIELDS: Final[Mapping[str, Bound | Rule]] = {
    # Offline requests get a priority below all of these.
    "priority": Bound(-(2**31), _INT32, is_whole=True),
    "max_thinking_tokens": _WHOLE,
    "top_logprobs_num": Bound(0, MOST_LOGPROBS, is_whole=True),
    "logprob_start_len": Bound(-1, _INT32, is_whole=True),
    "routed_experts_start_len": _WHOLE,
    "routed_dp_rank": _WHOLE,
    "data_parallel_rank": _WHOLE,
    "disagg_prefill_dp_rank": _WHOLE,
    "decode_tp_size": Bound(1, _INT32, is_whole=True),
    "bootstrap_port": Bound(0, 2**16 - 1, is_whole=True),
    "bootstrap_room": Bound(0, 2**63 - 1, is_whole=True),
    "dimensions": Bound(1, _INT32, is_whole=True),
    "embed_override_token_id": _WHOLE,
    "min_dynamic_patch": _TILES,
    "max_dynamic_patch": _TILES,
    "image_max_dynamic_patch": _TILES,
    "video_max_dynamic_patch": _TILES,
    **dict.fromkeys(
        (
            *("rid", "sampling_params", "text", "input_ids", "token_ids_logprob"),
            *("image_data", "video_data", "audio_data", "custom_logit_processor"),
            *("return_logprob", "video_config", "images_config", "mm_processor_kwargs"),
        ),
        Rule.CHECKED,
    ),
    **dict.fromkeys(
        (
            *("stream", "return_text_in_logprobs", "return_prompt_token_ids"),
            *("return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs"),
            *("return_flat_raw_top_logprobs_b64", "return_sampling_mask"),
            *("sampling_logprobs_mode", "return_routed_experts", "return_indexer_topk"),
            *("return_hidden_states", "return_pooled_hidden_states"),
            *("return_bytes", "return_entropy"),
            *("is_cross_encoder_request", "require_reasoning", "watermark", "no_logs"),
            *("session_id", "session_params", "conversation_id", "routing_key", "extra_key"),
            *("cache_salt", "lora_path", "modalities", "use_audio_in_video"),
            *("bootstrap_host", "bootstrap_pair_key"),
        ),
        Rule.PLAIN,
    ),
    **dict.fromkeys(
        (
            # The time of arrival: SLOs, limits and metrics of all requests are computed from it.
            "received_time",
            # A request that goes on without its client, or that no metric counts.
            *("background", "log_metrics"),
            # Positions in the prompt that the forward pass reads without a check.
            *("token_indices_to_pool", "multi_item_delimiter_indices", "decision_layout"),
            # Tensors, which no JSON value is.
            *("positional_embed_overrides", "embed_overrides"),
            # Prometheus has no label that it was not started with.
            "custom_labels",
            # Keys of caches that all clients share.
            *("mm_hashes", "mm_content_hashes", "kv_hints"),
            *("lora_id", "http_worker_ipc", "mm_data_mooncake", "encoder_urls"),
            *("need_wait_for_mm_inputs", "num_items_assigned", "external_trace_header"),
        ),
        Rule.SERVER,
    ),
    # A step that has token ids and vectors for prompts ends the scheduler, and so do vectors of
    # 32 bits for a model of 16.
    "input_embeds": Rule.REFUSED,
}
"""Fields of ``GenerateReqInput`` and ``EmbeddingReqInput``."""
