"""No process of a server looks through all of its objects while it imports, and each does later."""

from __future__ import annotations

import gc
import subprocess
import sys

SCRIPT = """
import gc, runpy
from types import SimpleNamespace

runpy.run_module("sglang_coserve.launch_server", run_name="__mp_main__")
print("while importing:", gc.get_threshold())
importing = gc.get_threshold()

from sglang_coserve.config import CoserveConfig
from sglang_coserve.srt import processes
from sglang_coserve.srt.cpu import defaults

defaults.set_environment_defaults()
from sglang.srt.managers import data_parallel_controller, detokenizer_manager, scheduler

for module, name, arguments in (
    (scheduler, "run_scheduler_process", [SimpleNamespace(_coserve=CoserveConfig())]),
    (detokenizer_manager, "run_detokenizer_process", []),
    (data_parallel_controller, "run_data_parallel_controller_process", []),
):
    gc.set_threshold(*importing)
    setattr(module, name, lambda *_, name=name: print(f"{name}:", gc.get_threshold()))
    getattr(processes, name)(*arguments)
"""


def test_full_collections_begin_when_a_process_has_imported() -> None:
    usual = gc.get_threshold()
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    told = [line for line in done.stdout.splitlines() if line.endswith(")") and ": (" in line]
    assert told == [
        f"while importing: {(*usual[:2], 1000)}",
        f"run_scheduler_process: {usual}",
        f"run_detokenizer_process: {usual}",
        f"run_data_parallel_controller_process: {usual}",
    ]
