"""Offline requests end when their LoRA adapter is unloaded; online ones are waited for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from sglang_coserve.srt.tokenizer.adapter_unloads import AdapterUnloads


class Manager:
    """SGLang's registry of adapters, and requests that hold an adapter until they are aborted."""

    def __init__(self) -> None:
        from sglang.srt.lora.lora_registry import LoRARef, LoRARegistry

        names = ("poet", "clerk")
        self.lora_registry = LoRARegistry([LoRARef(lora_name=n, lora_path=n) for n in names])
        self.rid_to_state: dict[str, Any] = {}
        self.aborted: list[str] = []
        self.unloads = AdapterUnloads(self)

    async def send(self, rid: str, adapter: str, *, offline: bool, lora_id: Any = None) -> str:
        lora_id = lora_id or await self.lora_registry.acquire(adapter)
        params = {"coserve_class": "offline"} if offline else None
        self.rid_to_state[rid] = SimpleNamespace(dispatched=False)
        sampling = SimpleNamespace(custom_params=params)
        self.unloads.sending(SimpleNamespace(rid=rid, lora_id=lora_id, sampling_params=sampling))
        self.rid_to_state[rid].dispatched = True
        return str(lora_id)

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)

    async def unload(self, adapter: str) -> None:
        lora_id = await self.lora_registry.unregister(adapter)
        await self.lora_registry.wait_for_unload(lora_id)


async def test_an_unload_ends_offline_requests_and_waits_for_online_ones() -> None:
    manager = Manager()
    lora_id = await manager.send("offline", "poet", offline=True)
    await manager.send("online", "poet", offline=False)
    await manager.send("other", "clerk", offline=True)
    unload = asyncio.create_task(manager.unload("poet"))
    await asyncio.sleep(0.01)
    assert manager.aborted == ["offline"]
    await manager.send("late", "poet", offline=True, lora_id=lora_id)  # Tokenized before.
    while len(manager.aborted) == 1:
        await asyncio.sleep(0.01)
    await manager.lora_registry.release(lora_id)
    await asyncio.sleep(0.01)
    assert not unload.done()
    await manager.lora_registry.release(lora_id)
    await asyncio.wait_for(unload, 10)
    assert manager.aborted == ["offline", "late"]
