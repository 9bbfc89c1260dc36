"""A scheduler whose checkpoints are checked after every batch."""

from __future__ import annotations

from typing import Any

from srt.kv_checkpoint.consistency import assert_consistent


def checking_checkpoints(base: type) -> type:
    class CheckingScheduler(base):  # type: ignore[valid-type,misc]
        def process_batch_result(self, batch: Any, result: Any) -> None:
            super().process_batch_result(batch, result)
            assert_consistent(self.tree_cache)
            for checkpoint in self.tree_cache._saver.checkpoints.values():
                _assert_saved(self.tree_cache, checkpoint)

    return CheckingScheduler


def _assert_saved(cache: Any, checkpoint: Any) -> None:
    """What counts as saved is the KV that the request has on the device, and nothing is sent that
    is not computed."""
    from sglang_coserve.srt import compat

    start = checkpoint.start_tokens
    assert start + checkpoint.sent_tokens <= compat.computed_tokens(checkpoint.req)
    end = checkpoint.saved_end_tokens
    device_slots = cache.req_to_token_pool.req_to_token[
        compat.slot_of(checkpoint.req), start:end
    ].tolist()
    host_slots = list(checkpoint.host_slots[: end - start])
    device, host = cache.token_to_kv_pool_allocator.get_kvcache(), cache.host_pool
    for layer in range(device.layer_num):
        for on_device, on_host in (
            (device.k_buffer, host.k_buffer),
            (device.v_buffer, host.v_buffer),
        ):
            assert on_device[layer][device_slots].equal(on_host[layer][host_slots])
