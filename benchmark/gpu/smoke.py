"""Step ``smoke``: the stack imports, and a server of ours serves both classes on the GPU."""

from __future__ import annotations

import importlib
import importlib.metadata
import random
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx

from coserve_bench.table import markdown_table
from gpu.task import Task, run_step
from sglang_coserve.errors import CoserveError, StartupError
from sglang_coserve.local_server import LocalServer

_MODULES: Final = (
    *("torch", "triton", "flashinfer", "sgl_kernel", "sglang", "transformers", "tokenizers"),
    *("sortedcontainers", "orjson", "zmq", "httpx", "fastapi", "typer", "rich", "matplotlib"),
)
_GPU_ONLY: Final = ("triton", "flashinfer")
_DISTRIBUTIONS: Final = {
    "sgl_kernel": "sglang-kernel",
    "flashinfer": "flashinfer-python",
    "zmq": "pyzmq",
}
_OTHER_BACKEND: Final = "triton"
_READY_TIMEOUT_S: Final = 400.0
_ANSWER_TIMEOUT_S: Final = 120.0
_LEAST_VOCABULARY: Final = 512
_OURS: Final = ("--offline-policy", "coserve", "--slo-ttft-ms", "2000", "--slo-tpot-ms", "200")


def measure(task: Task) -> bool:
    """Import, serve, check who schedules; fails with the reason if one of them does not work."""
    figures: dict[str, Any] = {"versions": import_all(task)}
    task.report(figures)
    backends = list(dict.fromkeys((task.setting.attention_backend, _OTHER_BACKEND)))
    problems: dict[str, str] = {}
    for backend in ["torch_native"] if task.dry_run else backends:
        try:
            served = serve(task, backend)
        except CoserveError as error:
            # The kernels of one backend may not build where those of another do.
            print(f"{backend}: {error}", flush=True)
            problems[backend] = str(error)[-2000:]
            continue
        figures |= served
        figures |= {"attention_backend": None if task.dry_run else backend, "problems": problems}
        task.report(figures, table(figures))
        return True
    task.report({**figures, "problems": problems})
    reasons = "; ".join(f"{backend}: {problem}" for backend, problem in problems.items())
    raise StartupError(f"no attention backend works: {reasons}")


def import_all(task: Task) -> dict[str, str]:
    """Return the versions of everything that is needed.

    Raises:
        StartupError: what cannot be imported, all of it at once.
    """
    versions, missing = {}, []
    for name in _MODULES:
        if task.dry_run and name in _GPU_ONLY:
            continue
        try:
            importlib.import_module(name)
        except Exception as error:
            missing.append(f"{name} ({type(error).__name__}: {error})")
            continue
        distribution = _DISTRIBUTIONS.get(name, name)
        try:
            versions[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "no metadata"
    if missing:
        raise StartupError("cannot be imported: " + "; ".join(missing))
    return versions


def serve(task: Task, backend: str) -> dict[str, Any]:
    """Start a server, send both classes, and return what it says of itself.

    Raises:
        StartupError: it does not start, or something of ours or of CUDA's is not in place.
    """
    model, flags = task.model_path(), task.server_flags()
    if not task.dry_run:
        flags[flags.index("--attention-backend") + 1] = backend
    profile_s = "1" if task.dry_run else "5"
    began_s = time.perf_counter()
    with LocalServer(
        ["--model-path", str(model), *_OURS, "--startup-profile-seconds", profile_s, *flags],
        log_path=task.folder / f"server_{backend}.log",
        ready_timeout_s=min(_READY_TIMEOUT_S, task.remaining_s - 30),
    ) as server:
        started_s = time.perf_counter() - began_s
        with httpx.Client(
            base_url=server.base_url, timeout=_ANSWER_TIMEOUT_S, trust_env=False
        ) as client:
            answers = send_both(client, task)
            state = client.get("/coserve/status").json()["replicas"][0]
            info = client.get("/server_info").json()
    check(state, info, on_gpu=not task.dry_run, sent_offline=answers["offline"]["n"])
    return {
        "started_s": started_s,
        "answers": answers,
        "offline_policy": state["config"]["offline_policy"],
        "offline": state["offline"],
        "safepoints": state.get("safepoints"),
        "memory_gb": info["internal_states"][0]["memory_usage"],
        "startup_s": info["internal_states"][0]["startup_time"],
        "capacity_tokens": info["internal_states"][0]["memory_usage"]["token_capacity"],
    }


def send_both(client: httpx.Client, task: Task) -> dict[str, dict[str, Any]]:
    """Send offline requests and online ones beside them; return how long each class took."""
    prompt_tokens, output_tokens = (64, 8) if task.dry_run else (2048, 64)
    num_offline, num_online = (4, 2) if task.dry_run else (32, 8)
    rng = random.Random(0)

    def one(is_offline: bool) -> float:
        body = {
            "model": "default",
            "prompt": rng.choices(range(16, _LEAST_VOCABULARY), k=prompt_tokens),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **({"service_tier": "flex"} if is_offline else {}),
        }
        began_s = time.perf_counter()
        answer = client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            raise StartupError(f"HTTP {answer.status_code}: {answer.text[:300]}")
        fields = answer.json()
        if fields["usage"]["completion_tokens"] != output_tokens:
            raise StartupError(f"{fields['usage']} where {output_tokens} tokens were asked for")
        if is_offline and fields.get("service_tier") != "flex":
            raise StartupError(f"service tier {fields.get('service_tier')!r} where flex was due")
        return time.perf_counter() - began_s

    one(is_offline=False)  # Kernels are built and tuned.
    alone_s = one(is_offline=False)
    with ThreadPoolExecutor(num_offline + num_online) as pool:
        offline = [pool.submit(one, True) for _ in range(num_offline)]
        online = [pool.submit(one, False) for _ in range(num_online)]
        times = {"offline": [f.result() for f in offline], "online": [f.result() for f in online]}
    lengths = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    return {
        "alone": {"n": 1, "longest_s": alone_s, **lengths},
        **{name: {"n": len(t), "longest_s": max(t), **lengths} for name, t in times.items()},
    }


def check(
    state: Mapping[str, Any], info: Mapping[str, Any], *, on_gpu: bool, sent_offline: int
) -> None:
    """See that our scheduler served, and CUDA graphs were captured.

    Raises:
        StartupError: what is not in place.
    """
    problems = []
    if state["config"]["offline_policy"] != "coserve":
        problems.append(f"the policy is {state['config']['offline_policy']}, not coserve")
    if state["offline"].get("received") != sent_offline:
        problems.append(f"the scheduler's counts are {state['offline']}, sent {sent_offline}")
    graphs = info["internal_states"][0]["memory_usage"]["graph"]
    if on_gpu and not graphs.get("decode"):
        problems.append(f"no decode CUDA graph was captured: {graphs}")
    if problems:
        raise StartupError("; ".join(problems))


def table(figures: Mapping[str, Any]) -> str:
    """Return the figures in short."""
    graphs = figures["memory_gb"]["graph"]
    safepoints = figures["safepoints"] or {}
    rows = [
        ["attention backend", str(figures["attention_backend"])],
        ["start of the server", f"{figures['started_s']:.0f} s"],
        ["KV memory", f"{figures['capacity_tokens']:,} tokens"],
        ["memory of CUDA graphs", ", ".join(f"{k} {v} GB" for k, v in graphs.items()) or "none"],
        ["safepoints", "on" if safepoints.get("enabled") else f"off: {safepoints.get('reason')}"],
    ]
    for name, answer in figures["answers"].items():
        what = f"{answer['n']} × {answer['prompt_tokens']} + {answer['output_tokens']} tokens"
        rows.append([f"{name}: {what}, longest", f"{answer['longest_s']:.2f} s"])
    return markdown_table(("", "found"), rows)


if __name__ == "__main__":
    sys.exit(run_step(measure))
