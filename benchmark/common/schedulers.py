"""A real scheduler with its model in this process, ours or SGLang's; for ``OwnProcess``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def start_scheduler(
    model: Path, settings: Mapping[str, Any], coserve: Mapping[str, Any] | None
) -> Any:
    """Return a scheduler that computes with one thread on a CPU; one a process.

    Args:
        model: its folder.
        settings: fields of ``ServerArgs``, in place of what is usual on a CPU.
        coserve: fields of ``CoserveConfig``; None: stock SGLang's scheduler.
    """
    from sglang_coserve.srt import compat
    from sglang_coserve.srt.cpu import defaults as cpu
    from sglang_coserve.srt.cpu.replacements import install_replacements

    cpu.set_environment_defaults()
    import torch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import PortArgs, ServerArgs

    from sglang_coserve.config import CoserveConfig
    from sglang_coserve.srt.optional_parts import KV_STORE
    from sglang_coserve.srt.scheduler.scheduler import CoserveScheduler

    on_cpu = not cpu.has_cuda()
    if on_cpu:
        torch.set_num_threads(1)
        install_replacements()
    usual = usual_settings(is_ours=coserve is not None, on_cpu=on_cpu)
    config, caches = None, {}
    if coserve is not None:
        config = CoserveConfig(**coserve)
        KV_STORE.register(config, on_cpu=on_cpu)
        caches = KV_STORE.server_settings({}, config, on_cpu=on_cpu)
    server_args = ServerArgs(
        **{**usual, "model_path": str(model), "log_level": "warning", **settings, **caches}
    )
    kind: type = Scheduler
    if config is not None:
        server_args._coserve = config
        kind = CoserveScheduler
    port_args = PortArgs.init_new(server_args)
    return compat.start_scheduler(kind, server_args, port_args, 0, configures=False)


def usual_settings(*, is_ours: bool, on_cpu: bool) -> dict[str, Any]:
    """Return the fields of ``ServerArgs`` that a server starts with, ours or stock SGLang's."""
    from sglang_coserve.srt.cpu import defaults as cpu
    from sglang_coserve.srt.start_defaults import ANYWHERE

    return {**(ANYWHERE if is_ours else {}), **(cpu.FLAG_DEFAULTS if on_cpu else {})}


def run_loop(scheduler: Any, receive: Callable[[], list[Any]]) -> None:
    """Run the scheduler's event loop until it is told to exit (``gracefully_exit``).

    ``receive`` returns the messages that come before each pass.
    """
    scheduler.request_receiver = SimpleNamespace(recv_requests=lambda *_, **__: receive())
    scheduler.idle_sleeper = None  # Nothing comes that would wake it.
    scheduler.gracefully_exit = False
    scheduler.run_event_loop()
