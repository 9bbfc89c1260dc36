"""What is done to servers, by name.

What hurts one server returns since when requests to it fail, if any may.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from typing import Final

import httpx2
import psutil

from chaos_bench.answers import ADAPTER
from chaos_bench.figures import ChaosError, Interval
from chaos_bench.servers import ADMIN_KEY, SETTLE_S, Hurt, Servers
from sglang_coserve.errors import StartupError
from sglang_coserve.local_server import LocalServer

_DRAIN_TIMEOUT_S: Final = 60.0
_CALL_TIMEOUT_S: Final = 120.0
_FULL_DISK_BYTES: Final = 1 << 20
"""What a file may grow to while the disk is "full"; the database and the journals are larger."""

_FULL_DISK_S: Final = 4.0
_FAILING_SYNCS_S: Final = 4.0
_CUTS: Final = 8
_CUT_EVERY_S: Final = 3.0
_UNLOADED_S: Final = 5.0
"""Time for which an engine is without its adapter."""

Injury = Callable[[Servers], bool]
"""False when no engine is there to be hurt."""


def kill(_servers: Servers, server: LocalServer) -> float:
    """End all processes at once."""
    began_s = time.monotonic()
    server.kill()
    return began_s


def kill_starting(servers: Servers, server: LocalServer) -> float:
    """The same twice, the second time before it is ready."""
    began_s = kill(servers, server)
    killing = threading.Timer(servers.rng.uniform(0.2, servers.start_s), server.kill)
    killing.start()
    with suppress(StartupError):  # Killed before it was ready.
        servers.start(server)
    killing.join()
    return began_s


def stop(_servers: Servers, server: LocalServer) -> float:
    """Stop it as an operator does; what clients still send may keep it until it is killed."""
    began_s = time.monotonic()
    server.stop()
    return began_s


def drain(servers: Servers, server: LocalServer) -> None:
    """Stop an engine with SIGTERM, which it must obey in order: a router sends it nothing more."""
    group = psutil.Process(server.pid)
    processes = [group, *group.children(recursive=True)]
    os.kill(server.pid, signal.SIGTERM)
    status = server.wait(_DRAIN_TIMEOUT_S)
    left = [process for process in processes if _runs(process)]
    if status != 0 or left:
        servers.fail(f"{server.base_url} ended with status {status}, {len(left)} processes left")
    server.stop()


def kill_child(servers: Servers, server: LocalServer, name: str) -> float:
    """Let a process of the engine die; the server has to notice and end."""
    began_s = time.monotonic()
    for child in psutil.Process(server.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any(name in part for part in child.cmdline()):
                child.kill()
    if server.wait(servers.end_timeout_s) is None:
        servers.fail(f"{server.base_url} runs on without its {name}")
        server.kill()
    return began_s


def freeze(servers: Servers, server: LocalServer) -> float | None:
    """Stop all processes for a while, as a machine does that is suspended."""
    began_s = time.monotonic()
    try:
        os.killpg(server.pid, signal.SIGSTOP)
        time.sleep(servers.frozen_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGCONT)
    return None if servers.is_fleet else began_s


def freeze_scheduler(servers: Servers, server: LocalServer) -> None:
    """Stop the schedulers of an engine for a while; its HTTP server answers as before."""
    children = psutil.Process(server.pid).children(recursive=True)
    frozen = [child for child in children if _is_scheduler(child)]
    try:
        for child in frozen:
            child.suspend()
        time.sleep(servers.frozen_s)
    finally:
        for child in frozen:
            with suppress(psutil.NoSuchProcess):
                child.resume()


def cut_connections(servers: Servers) -> bool:
    """Cut all connections between the gateway and its engines, again and again."""
    for _ in range(_CUTS):
        servers.proxies.cut()
        time.sleep(_CUT_EVERY_S)
    return True


def fill_disk(servers: Servers, server: LocalServer) -> None:
    """Let no file grow for a while."""
    start_s = time.monotonic()
    kind = resource.RLIMIT_FSIZE
    limits = (_FULL_DISK_BYTES, resource.RLIM_INFINITY)
    before = resource.prlimit(server.pid, kind, limits)
    time.sleep(_FULL_DISK_S)
    resource.prlimit(server.pid, kind, before)
    # Batches try again after a while; until then uploads may still be refused.
    servers.full_disk.append(Interval(start_s, time.monotonic() + SETTLE_S))


def fail_syncs(servers: Servers, server: LocalServer) -> float:
    """Let no file be synced for a while, and then lose the power, and with it what was not."""
    start_s = time.monotonic()
    servers.disk.let_syncs_fail(True)
    time.sleep(_FAILING_SYNCS_S)
    began_s = kill(servers, server)
    servers.disk.let_syncs_fail(False)
    servers.disk.tear()
    servers.full_disk.append(Interval(start_s, time.monotonic() + SETTLE_S))
    return began_s


def fail_power(servers: Servers, server: LocalServer) -> float:
    """End all processes and tear the tails off files that were not synced."""
    began_s = kill(servers, server)
    servers.disk.tear()
    return began_s


def abort_all(_servers: Servers, server: LocalServer) -> float:
    """Let SGLang abort everything that runs and waits, as before an exchange of weights."""
    began_s = time.monotonic()
    _post(server, "/pause_generation", mode="abort")
    _post(server, "/continue_generation")
    return began_s


def update_weights(servers: Servers, server: LocalServer) -> float:
    """Load the same weights twice in a row, in the midst of all requests."""
    began_s = time.monotonic()
    for _ in range(2):
        _post(server, "/update_weights_from_disk", model_path=servers.model_path)
    return began_s


def kill_gateway(servers: Servers) -> bool:
    """End the gateway at once, and start another one."""
    began_s = kill(servers, servers.keeper)
    servers.start(servers.keeper)
    servers.gateway_outages.append(Interval(began_s, time.monotonic()))
    return True


def freeze_all(servers: Servers) -> bool:
    """Stop all engines for a while, but for one that a router needs. The canary, which has another
    model, goes on answering the gateway."""
    wait(servers.being_hurt.values())
    wait([servers.begin_to_hurt(each, freeze) for each in servers.engines[servers.spared :]])
    return True


def reload_adapter(servers: Servers, server: LocalServer) -> None:
    """Unload the adapter from an engine, and load it again."""
    _post(server, "/unload_lora_adapter", lora_name=ADAPTER)
    time.sleep(_UNLOADED_S)
    _post(server, "/load_lora_adapter", lora_name=ADAPTER, lora_path=str(servers.adapter))


def _of_one(hurt: Hurt) -> Injury:
    return lambda servers: servers.hurt_one(hurt)


def _of_each(hurt: Hurt) -> Injury:
    """Return the injury of all engines, one after the other, each once all others are up."""

    def injure(servers: Servers) -> bool:
        for engine in servers.engines:
            wait(servers.being_hurt.values())
            servers.begin_to_hurt(engine, hurt).result()
        return True

    return injure


OF_A_SERVER: Final[Mapping[str, Injury]] = {
    "kill -9": _of_one(kill),
    "kill -9 while starting": _of_one(kill_starting),
    "SIGTERM": _of_one(stop),
    "kill -9 of the scheduler": _of_one(partial(kill_child, name="sglang::scheduler")),
    "kill -9 of the detokenizer": _of_one(partial(kill_child, name="sglang::detokenizer")),
    "SIGSTOP": _of_one(freeze),
    "full disk": _of_one(fill_disk),
    "failing syncs": _of_one(fail_syncs),
    "power failure": _of_one(fail_power),
    "abort of all requests": _of_one(abort_all),
    "two updates of the weights": _of_one(update_weights),
}
OF_A_FLEET: Final[Mapping[str, Injury]] = {
    "kill -9 of an engine": _of_one(kill),
    "kill -9 of the gateway": kill_gateway,
    "kill -9 of a scheduler": _of_one(partial(kill_child, name="sglang::scheduler")),
    "drain of an engine": _of_one(drain),
    "SIGSTOP of an engine": _of_one(freeze),
    "SIGSTOP of a scheduler": _of_one(freeze_scheduler),
    "connections cut every 3 s": cut_connections,
    "rolling restart": _of_each(drain),
    "SIGSTOP of all engines beside a canary": freeze_all,
    "an adapter unloaded and loaded again": _of_each(reload_adapter),
}


def injuries_of(engines: int) -> Mapping[str, Injury]:
    """Return everything that is done, by name, to a fleet of so many engines; 0: to a server."""
    return OF_A_FLEET if engines else OF_A_SERVER


def _post(server: LocalServer, path: str, **body: str) -> None:
    try:
        url = f"{server.base_url}{path}"
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        timeout_s = _CALL_TIMEOUT_S
        answer = httpx2.post(url, json=body, headers=headers, timeout=timeout_s, trust_env=False)
        answer.raise_for_status()
    except httpx2.HTTPError as error:
        raise ChaosError(f"POST {path}: {error}") from error


def _is_scheduler(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return any("sglang::scheduler" in part for part in process.cmdline())
    return False


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False
