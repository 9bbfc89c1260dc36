"""What has changed with SGLang 0.5.18: how requests fail before the scheduler has them, and who
copies KV between device and host."""

from __future__ import annotations

from typing import Any

from sglang_coserve.srt.compat.replacements import replace

__all__ = [
    "aborted_errors",
    "check_extra_keys",
    "copy_streams",
    "own_number_settings",
    "radix_key",
    "replace_copy_engine",
    "start_load",
]

Req = Any


def aborted_errors() -> tuple[type[Exception], ...]:
    """As in ``v17``; SGLang has no such error any more, and answers as for a running request."""
    return ()


def check_extra_keys() -> None:
    """As in ``v17``; SGLang checks them itself."""


def own_number_settings() -> tuple[str, ...]:
    """As in ``v17``."""
    return ()


def radix_key(req: Req, tokens: int) -> Any:
    """As in ``v17``; a request's salt keeps its KV from those with another one."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tokens_of_key = (req.origin_input_ids + req.output_ids)[:tokens]
    return RadixKey(tokens_of_key, req.extra_key, cache_salt=req.cache_salt)


def copy_streams(controller: Any) -> tuple[Any, Any]:
    """As in ``v17``."""
    engine = controller.l2_transfer_engine
    return engine.device_to_host_stream, engine.host_to_device_stream


def replace_copy_engine(device_module: Any) -> None:
    """As in ``v17``."""
    from sglang.srt.mem_cache import l2_transfer

    replace("sglang.srt.managers.cache_controller.device_module", device_module)
    replace("sglang.srt.mem_cache.l2_transfer.device_module", device_module)
    l2_transfer._timing_events_supported.cache_clear()


def start_load(controller: Any, host_slots: Any, device_slots: Any, load_id: int) -> None:
    """As in ``v17``."""
    submit_load(controller, host_slots, device_slots, load_id, layer_num=controller.layer_num)


def submit_load(
    controller: Any, host_slots: Any, device_slots: Any, load_id: int, **layers: int
) -> None:
    """As ``start_load``; ``layers`` passes their number to SGLang."""
    from sglang.srt.managers.cache_controller import CacheOperation, HiCacheAck

    operation = CacheOperation(host_slots, device_slots, load_id)
    slots = controller._move_op_indices(operation)
    copy_streams(controller)[1].wait_stream(controller.load_fence_stream)
    copy = controller.l2_transfer_engine.submit_host_to_device(
        controller._l2_load_transfers(*slots), **layers
    )
    controller.ack_load_queue.append(
        HiCacheAck(
            copy.start_event,
            copy.finish_event,
            [load_id],
            len(device_slots),
            timing_enabled=copy.timing_enabled,
        )
    )
