"""What the launcher refuses, and that it notices when a part is not in place."""

from __future__ import annotations

import inspect
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from sglang_coserve.batch.routes import add_batch_routes
from sglang_coserve.config import CoserveConfig
from sglang_coserve.errors import StartupError, UnsupportedError
from sglang_coserve.srt import cpu

cpu.set_environment_defaults()  # Before SGLang is imported.

from sglang_coserve.srt import compat, launch  # noqa: E402
from sglang_coserve.srt.marks_middleware import MarksMiddleware  # noqa: E402
from sglang_coserve.srt.request_gate import RequestGateMiddleware  # noqa: E402
from sglang_coserve.srt.unread_body import UnreadBodyMiddleware  # noqa: E402


def launch_server(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_coserve.launch_server", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_help_shows_sglangs_flags_and_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launch.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for flag in ("--model-path", "--slo-ttft-ms", "--offline-max-running"):
        assert flag in shown


def test_flags_are_parsed_again_and_again_and_leave_sglang_as_it_was(small_model: Path) -> None:
    from sglang.srt.server_args import ServerArgs

    before = dict(vars(ServerArgs))
    for ttft_ms in (100.0, 200.0):
        argv = ["--model-path", str(small_model), "--slo-ttft-ms", str(ttft_ms)]
        server_args = launch.parse_server_args(argv, on_cpu=True)
        assert server_args._coserve.slo_ttft_ms == ttft_ms
        assert compat.settings_of(server_args).attention_backend == "torch_native"
    after = vars(ServerArgs)
    assert all(after[name] is before[name] for name in ("add_cli_args", "from_cli_args"))


UNSUPPORTED = {
    "--pp-async-batch-depth": {"pp_size": 2, "pp_async_batch_depth": 1},
    "DP attention": {"enable_dp_attention": True},
    "speculative decoding": {"speculative_algorithm": "NGRAM"},
    "several tokenizer workers": {"tokenizer_worker_num": 2},
    "PD disaggregation": {"disaggregation_mode": "prefill"},
}


def server_args(**changes: Any) -> Any:
    values = {
        "pp_size": 1,
        "pp_async_batch_depth": 0,
        "enable_dynamic_chunking": False,
        "enable_dp_attention": False,
        "speculative_algorithm": None,
        "tokenizer_worker_num": 1,
        "disaggregation_mode": "null",
        "dllm_algorithm": None,
        "hicache_storage_backend": None,
        "enable_hisparse": False,
        "grpc_mode": False,
        "smg_grpc_mode": False,
        "use_ray": False,
        "encoder_only": False,
        "device": "cpu",
        "schedule_policy": "fcfs",
    }
    return SimpleNamespace(**(values | changes))


@pytest.mark.parametrize(("name", "changes"), UNSUPPORTED.items(), ids=UNSUPPORTED)
def test_an_unsupported_setting_is_refused_by_name(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=name):
        compat.check_server_args(server_args(**changes), CoserveConfig())


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "lof", "random"])
def test_another_order_of_sglangs_is_for_fifo_alone(policy: str) -> None:
    """It would sort the chunks of a plan again."""
    args = server_args(schedule_policy=policy)
    compat.check_server_args(args, CoserveConfig(offline_policy="fifo"))
    with pytest.raises(UnsupportedError, match=f"--schedule-policy {policy} with"):
        compat.check_server_args(args, CoserveConfig(offline_policy="coserve"))


def test_a_pipeline_takes_plans_but_no_checkpoints_and_no_chunks_of_sglangs_choice() -> None:
    compat.check_server_args(server_args(pp_size=2), CoserveConfig(offline_policy="coserve"))
    with pytest.raises(UnsupportedError, match="--kv-checkpoint with pipeline parallelism"):
        compat.check_server_args(server_args(pp_size=2), CoserveConfig(kv_checkpoint="eager"))
    dynamic = server_args(pp_size=2, enable_dynamic_chunking=True)
    compat.check_server_args(dynamic, CoserveConfig())
    with pytest.raises(UnsupportedError, match="--enable-dynamic-chunking with"):
        compat.check_server_args(dynamic, CoserveConfig(offline_policy="coserve"))


def test_decode_graphs_are_refused_on_a_cpu() -> None:
    config = CoserveConfig(
        offline_policy="coserve", safepoint_interval=2, safepoint_decode_graphs=True
    )
    compat.check_server_args(server_args(device="cuda"), config)
    with pytest.raises(UnsupportedError, match="--safepoint-decode-graphs on a CPU"):
        compat.check_server_args(server_args(), config)


def test_decode_steps_between_prefills_are_refused() -> None:
    """A setting since 0.5.19: SGLang would decide about prefills before a plan does."""
    with pytest.raises(UnsupportedError, match="--prefill-decode-interval"):
        compat.check_server_args(server_args(prefill_decode_interval=2), CoserveConfig())


def test_each_unsupported_setting_gets_a_line() -> None:
    with pytest.raises(UnsupportedError) as refused:
        compat.check_server_args(
            server_args(use_ray=True, enable_dp_attention=True), CoserveConfig()
        )
    assert len(str(refused.value).splitlines()) == 2


def test_the_checked_settings_exist_in_sglang() -> None:
    from sglang.srt.server_args import ServerArgs

    assert set(vars(server_args())) <= set(inspect.signature(ServerArgs).parameters)


def test_the_command_line_tells_one_line_and_exits_with_2(small_model: Path) -> None:
    refused = launch_server("--model-path", str(small_model), "--tokenizer-worker-num", "2")
    assert refused.returncode == 2
    errors = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "--tokenizer-worker-num" in errors[0]


def test_a_taken_port_is_refused_before_the_model_is_loaded(small_model: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        refused = launch_server(
            "--model-path", str(small_model), "--host", "127.0.0.1", "--port", port
        )
    assert refused.returncode == 2
    assert f"port {port}" in refused.stderr
    assert "Load weight" not in refused.stderr


def test_the_rust_server_is_refused(
    small_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    assert launch.main(["--model-path", str(small_model)]) == 2
    assert "Rust" in capsys.readouterr().err


def test_a_bad_value_of_our_flags_is_refused(
    small_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(["--model-path", str(small_model), "--slo-ttft-ms", "-5"]) == 2
    assert "error: --slo-ttft-ms must be a positive number" in capsys.readouterr().err


def answer() -> None:
    """A route of somebody."""


def complete_app() -> FastAPI:
    app = FastAPI()
    app.add_middleware(MarksMiddleware)
    app.add_middleware(RequestGateMiddleware)
    app.add_middleware(UnreadBodyMiddleware)
    app.add_api_route(launch.STATUS_PATH, answer)
    add_batch_routes(app)
    return app


def app_without(part: str) -> FastAPI:
    app = complete_app()
    app.user_middleware[:] = [each for each in app.user_middleware if each.cls.__name__ != part]
    app.router.routes[:] = [route for route in app.routes if getattr(route, "path", "") != part]
    return app


def shadowed_app() -> FastAPI:
    app = complete_app()
    app.add_api_route("/v1/files", answer)
    app.router.routes.insert(0, app.router.routes.pop())
    return app


def test_a_complete_server_passes() -> None:
    launch.verify_in_place(complete_app(), [{"coserve": {}}])


@pytest.mark.parametrize(
    ("app", "info", "says"),
    [
        (complete_app(), {"status": "ready"}, "scheduler 0 is not CoserveScheduler"),
        (app_without("MarksMiddleware"), {"coserve": {}}, "MarksMiddleware"),
        (app_without("RequestGateMiddleware"), {"coserve": {}}, "RequestGateMiddleware"),
        (app_without("UnreadBodyMiddleware"), {"coserve": {}}, "UnreadBodyMiddleware"),
        (app_without(launch.STATUS_PATH), {"coserve": {}}, launch.STATUS_PATH),
        (app_without("/v1/batches"), {"coserve": {}}, "batch route /v1/batches"),
        (shadowed_app(), {"coserve": {}}, "batch route /v1/files"),
    ],
    ids=["scheduler", "marks", "gate", "unread", "route", "batches", "another's route"],
)
def test_a_missing_part_stops_the_start(app: Any, info: dict[str, Any], says: str) -> None:
    with pytest.raises(StartupError, match=says):
        launch.verify_in_place(app, [info])
