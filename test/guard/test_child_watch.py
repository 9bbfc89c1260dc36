"""That a process ends with its children."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import multiprocessing, os, signal, time
from sglang_coserve.guard.process_health import end_with_children

def live_as_long_as(parent):
    while os.getppid() == parent:
        time.sleep(0.1)

end_with_children()
arguments = (os.getpid(),)
processes = [multiprocessing.Process(target=live_as_long_as, args=arguments) for _ in range(2)]
for process in processes:
    process.start()
time.sleep(2.5)
print("alive", flush=True)
os.kill(processes[1].pid, signal.SIGKILL)
time.sleep(60)
print("still alive", flush=True)
"""


def test_the_death_of_a_child_ends_its_parent() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == 1
    assert ended.stdout.splitlines() == ["alive"]
    assert "its siblings end with it" in ended.stderr
