"""Chooses, for the installed SGLang, among what differs between versions.

A file ``vN`` holds what has changed with 0.5.N. Of each function, that of the last file counts
whose version is not newer than SGLang. No other module asks for the version.
"""

from __future__ import annotations

from sglang_coserve.srt.compat.versions import INSTALLED

__all__ = [
    "aborted_errors",
    "cached_tokens_of",
    "check_extra_keys",
    "computed_tokens",
    "copy_streams",
    "exceeds_window_pool",
    "filter_out",
    "free_prepared",
    "has_unsaved_kv",
    "holds_kv",
    "inserting_cache",
    "is_mixed",
    "keep_outputs",
    "logit_processors",
    "model_config_of",
    "num_core_sets",
    "own_number_settings",
    "parallel",
    "place_context",
    "prefix_tokens",
    "protected_tokens",
    "put_back_outputs",
    "radix_key",
    "release_kv",
    "replace_copy_engine",
    "reserve_window_slots",
    "set_computed_tokens",
    "set_extent",
    "settings_of",
    "slot_of",
    "start_load",
    "start_scheduler",
    "tensors_beside",
]

if INSTALLED >= (0, 5, 18):
    from sglang_coserve.srt.compat.v18 import (
        aborted_errors,
        check_extra_keys,
        copy_streams,
        own_number_settings,
        radix_key,
        replace_copy_engine,
    )
else:
    from sglang_coserve.srt.compat.v17 import (
        aborted_errors,
        check_extra_keys,
        copy_streams,
        own_number_settings,
        radix_key,
        replace_copy_engine,
    )

if INSTALLED >= (0, 5, 19):
    from sglang_coserve.srt.compat.v19 import (
        computed_tokens,
        holds_kv,
        model_config_of,
        num_core_sets,
        protected_tokens,
        set_computed_tokens,
        settings_of,
        slot_of,
    )
else:
    from sglang_coserve.srt.compat.v17 import (
        computed_tokens,
        holds_kv,
        model_config_of,
        num_core_sets,
        protected_tokens,
        set_computed_tokens,
        settings_of,
        slot_of,
    )

if INSTALLED >= (0, 5, 21):
    from sglang_coserve.srt.compat.v21 import (
        exceeds_window_pool,
        is_mixed,
        keep_outputs,
        logit_processors,
        parallel,
        put_back_outputs,
        reserve_window_slots,
        start_load,
        start_scheduler,
        tensors_beside,
    )
else:
    from sglang_coserve.srt.compat.v17 import (
        exceeds_window_pool,
        is_mixed,
        keep_outputs,
        logit_processors,
        parallel,
        put_back_outputs,
        reserve_window_slots,
        tensors_beside,
    )

    if INSTALLED >= (0, 5, 18):
        from sglang_coserve.srt.compat.v18 import start_load
    else:
        from sglang_coserve.srt.compat.v17 import start_load

    if INSTALLED >= (0, 5, 20):
        from sglang_coserve.srt.compat.v20 import start_scheduler
    else:
        from sglang_coserve.srt.compat.v17 import start_scheduler

if INSTALLED >= (0, 5, 22):
    from sglang_coserve.srt.compat.v22 import (
        cached_tokens_of,
        filter_out,
        free_prepared,
        has_unsaved_kv,
        inserting_cache,
        place_context,
        prefix_tokens,
        release_kv,
        set_extent,
    )
else:
    from sglang_coserve.srt.compat.v17 import (
        filter_out,
        free_prepared,
        has_unsaved_kv,
        place_context,
        prefix_tokens,
        release_kv,
        set_extent,
    )

    if INSTALLED >= (0, 5, 21):
        from sglang_coserve.srt.compat.v21 import cached_tokens_of, inserting_cache
    else:
        from sglang_coserve.srt.compat.v17 import cached_tokens_of, inserting_cache
