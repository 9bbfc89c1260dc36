"""What the launcher refuses, and how."""

from __future__ import annotations

import inspect
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forked_processes import ForkedServers
from sglang_coserve.config import CoserveConfig
from sglang_coserve.config.config_file import Settings
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.errors import ConfigError, UnsupportedError
from sglang_coserve.guard.route_table import leaves
from sglang_coserve.latency_profile import LatencyProfile
from sglang_coserve.local_server import free_port
from sglang_coserve.srt import compat, launch
from sglang_coserve.srt.marks.marks_middleware import MARKED_PATHS, STRICT_PATHS
from sglang_coserve.srt.profiling import latency_source
from sglang_coserve.srt.start_defaults import set_up_platform
from web_server import Call, web_server

COMMAND = (sys.executable, "-m", "sglang_coserve.launch_server", "--host", "127.0.0.1")


@pytest.fixture
def launch_server(forked_servers: ForkedServers, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Returns the status of a server that is to end, and what it says."""

    def launched(*flags: str) -> tuple[int, str]:
        log = tmp_path / "server.log"
        with log.open("wb") as stdout:
            server = forked_servers.start([*COMMAND, *flags], env={**os.environ}, stdout=stdout)
        return server.wait(300), log.read_text()

    return launched


def test_the_environment_is_set_before_sglang_is_imported(
    small_model: Path, tmp_path: Path
) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text(f"model: {small_model}")
    program = (
        "import sys\n"
        "from sglang_coserve.srt import launch\n"
        "def seen(model_path):\n"
        "    print(model_path, 'sglang.srt' in sys.modules)\n"
        "    raise SystemExit\n"
        "launch.set_up_platform = seen\n"
        f"launch.launch_server(['--config', {str(settings)!r}])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == [str(small_model), "False"]


def test_an_idle_connection_is_kept_for_longer_than_routers_keep_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "SGLANG_TIMEOUT_KEEP_ALIVE"
    monkeypatch.setenv(name, "7")
    set_up_platform(None)
    assert os.environ[name] == "7"
    monkeypatch.delenv(name)
    set_up_platform(None)
    assert os.environ[name] == "120"


def test_help_shows_sglangs_flags_and_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launch.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for flag in (
        "--model-path",
        "--slo-ttft-ms",
        "--offline-max-running",
        "Example: coserve serve",
    ):
        assert flag in shown


def test_flags_are_parsed_again_and_again_and_leave_sglang_as_it_was(small_model: Path) -> None:
    from sglang.srt.server_args import ServerArgs

    before = dict(vars(ServerArgs))
    for ttft_ms in (100.0, 200.0):
        argv = ["--model-path", str(small_model), "--slo-ttft-ms", str(ttft_ms)]
        server_args = launch.parse_server_args(argv, set_up_platform(None))
        assert server_args._coserve.slo_ttft_ms == ttft_ms
        assert compat.settings_of(server_args).attention_backend == "torch_native"
    after = vars(ServerArgs)
    assert all(after[name] is before[name] for name in ("add_cli_args", "from_cli_args"))


def test_a_file_may_have_every_flag_of_ours_and_of_sglang(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "coserve.yaml"
    file.write_text(
        f"model-path: {small_model}\nport: 1234\n"
        "slo: ['ttft p99 <= 300ms', 'tpot mean <= 50ms']\nenable-metrics: true\n"
        "json_model_override_args: {max_position_embeddings: 64}\n"
    )
    monkeypatch.setenv("COSERVE_SERVED_MODEL_NAME", "m")
    names = launch._flag_names()
    argv = Settings(["--config", str(file), "--port", "4321"]).command_line(names)
    server_args = launch.parse_server_args(argv, set_up_platform(None))
    settings = compat.settings_of(server_args)
    assert (server_args.port, settings.served_model_name) == (4321, "m")
    assert settings.enable_metrics
    assert server_args._coserve.slo == ("ttft p99 <= 300ms", "tpot mean <= 50ms")


UNSUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "--pp-async-batch-depth": (
        "--pp-async-batch-depth",
        {"pp_size": 2, "pp_async_batch_depth": 1},
    ),
    "--enable-dynamic-chunking": (
        "--enable-dynamic-chunking",
        {"pp_size": 2, "enable_dynamic_chunking": True},
    ),
    "--enable-dp-attention": ("DP attention", {"enable_dp_attention": True}),
    "--attn-dp-size": ("DP attention", {"attn_dp_size": 2}),
    "--speculative-algorithm": ("speculative decoding", {"speculative_algorithm": "NGRAM"}),
    "--disaggregation-mode": ("PD disaggregation", {"disaggregation_mode": "prefill"}),
    "--dllm-algorithm": ("diffusion language models", {"dllm_algorithm": "LowConfidence"}),
    "--enable-pdmux": ("prefills beside decodes", {"enable_pdmux": True}),
    "--encoder-only": ("encoder-only", {"encoder_only": True}),
    "--tokenizer-worker-num": ("several tokenizer workers", {"tokenizer_worker_num": 2}),
    "--enable-http2": ("HTTP/2", {"enable_http2": True}),
    "--grpc-mode": ("gRPC", {"grpc_mode": True}),
    "--grpc-port": ("SGLANG_GRPC_PORT", {"grpc_port": 30001}),
    "--use-ray": ("Ray", {"use_ray": True}),
    "--hicache-storage-backend": ("HiCache storage", {"hicache_storage_backend": "file"}),
    "--enable-hisparse": ("sparse attention", {"enable_hisparse": True}),
    "--prefill-decode-interval": ("decode steps between", {"prefill_decode_interval": 2}),
    "--min-free-slots-delay": ("wait for free slots", {"min_free_slots_delay": 4}),
    "--enable-prefill-delayer": ("delayer", {"enable_prefill_delayer": True}),
    "--schedule-policy": ("--schedule-policy lpm", {"schedule_policy": "lpm"}),
}
"""What a planning server does not take: part of the message, and the setting."""


def server_args(**changes: Any) -> Any:
    """SGLang's own defaults on a CPU, but for ``changes``."""
    from sglang.srt.server_args import ServerArgs

    fields = inspect.signature(ServerArgs).parameters
    defaults = {name: field.default for name, field in fields.items()}
    return SimpleNamespace(**{**defaults, "device": "cpu", **changes})


@pytest.mark.parametrize("flag", UNSUPPORTED)
def test_an_unsupported_setting_is_refused_with_its_flag_a_reason_and_a_way_out(flag: str) -> None:
    name, changes = UNSUPPORTED[flag]
    with pytest.raises(UnsupportedError) as refused:
        compat.check_server_args(server_args(**changes), CoserveConfig(offline_policy="coserve"))
    (line,) = str(refused.value).splitlines()
    assert name in line
    assert flag in line
    _, reason, instead = line.split(": ")
    assert reason and instead


def test_a_limit_on_running_requests_is_refused_where_plans_pause_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "60")
    with pytest.raises(UnsupportedError, match=r"SGLANG_REQ_RUNNING_TIMEOUT\).*unset the variable"):
        compat.check_server_args(server_args(), CoserveConfig(offline_policy="coserve"))


def test_what_is_refused_is_in_the_table_of_the_documentation() -> None:
    table = Path(__file__).parents[2].joinpath("docs/support.md").read_text(encoding="utf-8")
    assert [flag for flag in UNSUPPORTED if flag not in table] == []


def test_a_pipeline_takes_plans() -> None:
    compat.check_server_args(server_args(pp_size=2), CoserveConfig(offline_policy="coserve"))


def test_decode_graphs_are_refused_on_a_cpu() -> None:
    config = CoserveConfig(
        offline_policy="coserve", safepoint_interval=2, safepoint_decode_graphs=True
    )
    compat.check_server_args(server_args(device="cuda"), config)
    with pytest.raises(UnsupportedError, match="--safepoint-decode-graphs on a CPU"):
        compat.check_server_args(server_args(), config)


COMMAND_LINES = {
    # SGLang changes other settings by these.
    "DP attention": "--tp-size 2 --dp-size 2 --enable-dp-attention",
    "speculative decoding": (
        "--speculative-algorithm EAGLE --speculative-draft-model-path {model}"
    ),
    "PD disaggregation": "--disaggregation-mode decode",
    "HiCache storage": "--enable-hierarchical-cache --hicache-storage-backend file",
    "--schedule-policy lpm": "--schedule-policy lpm --offline-policy coserve",
    "SGLang refuses settings or model (encoders)": "--encoder-only",
    "did you mean --slo-tpot-ms?": "--slo-tpt-ms 50",
    "--slo-ttft-ms must be greater than 0": "--slo-ttft-ms -5",
    "--slo-ttft-ms: '300ms' is not a number; write it without a unit": "--slo-ttft-ms 300ms",
}
"""What is refused, in the words of the message, and how one would ask for it."""


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_a_command_line_is_refused_before_anything_is_started(
    name: str, small_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = COMMAND_LINES[name].format(model=small_model).split()
    assert launch.main(["--model-path", str(small_model), *flags]) == 2
    shown = capsys.readouterr().err
    assert name.partition(" (")[0] in shown
    errors = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1


def test_a_taken_port_is_refused_before_the_model_is_loaded(
    small_model: Path, launch_server: Callable[..., tuple[int, str]]
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        status, said = launch_server("--model-path", str(small_model), "--port", port)
    assert status == 2
    assert f"port {port}" in said
    assert "Load weight" not in said


def test_a_bad_profile_is_refused_before_the_model_is_loaded(
    small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text("{}")
    flags = ["--model-path", str(small_model), "--latency-profile", str(profile)]
    assert launch.main(flags) == 2
    assert f"error: {profile}: schema_version: this field is missing" in capsys.readouterr().err


def test_a_profile_of_another_model_is_taken_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "profile.json"
    model = PolynomialModel.of(iteration_s=0.01)
    profile = LatencyProfile(model, None, "cpu", "llama", 1, "0.5.23")
    file.write_text(profile.to_json())
    machine: Any = SimpleNamespace(hardware="cpu", model="qwen", tp_size=1, sglang_version="0.5.23")
    machine.attention_backend = "fa3"
    assert latency_source._load(file, machine) == profile
    (warned,) = caplog.messages
    assert "the profile's model is llama, the server's is qwen" in warned
    assert "profile again" in warned
    machine.model = "llama"
    file.write_text(replace(profile, attention_backend="flashinfer").to_json())
    latency_source._load(file, machine)
    assert "attention backend is flashinfer, the server's is fa3" in caplog.messages[1]


def test_what_a_scheduler_refuses_is_told_without_a_traceback(
    small_model: Path, tmp_path: Path, launch_server: Callable[..., tuple[int, str]]
) -> None:
    """Once it has loaded the model: it cannot write its recording."""
    status, said = launch_server(
        *("--model-path", str(small_model), "--port", str(free_port())),
        *("--record-plans", str(tmp_path / "nowhere" / "plans.jsonl")),
        *("--startup-profile-seconds", "0"),
    )
    assert status == 2
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "nowhere" in errors[0]
    assert "did not start" in errors[1]
    assert len(errors) == 2
    assert "Traceback" not in said


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("tokens", "left_out", "reason"),
    [
        ("10", "", "the KV memory holds 10 tokens"),
        ("4096", "*.safetensors", "Cannot find any model weights"),
    ],
)
def test_a_model_that_cannot_be_served_is_told_without_a_traceback(
    small_model: Path,
    tmp_path: Path,
    launch_server: Callable[..., tuple[int, str]],
    tokens: str,
    left_out: str,
    reason: str,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(small_model, model, ignore=shutil.ignore_patterns(left_out))
    where = ("--model-path", str(model), "--port", str(free_port()))
    flags = ("--max-total-tokens", tokens, "--startup-profile-seconds", "0")
    status, said = launch_server(*where, *flags)
    assert status == 2
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert reason in errors[0]
    assert errors[1:] == ["error: the server did not start: the error above says why"]
    assert "Traceback" not in said


@pytest.mark.parametrize("name", ["SGLANG_RUST_SERVER", "SGLANG_ENABLE_REQUEST_DECOMPRESSION"])
def test_what_a_variable_turns_on_is_refused(
    small_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.setenv(name, "1")
    assert launch.main(["--model-path", str(small_model)]) == 2
    assert f"({name}=1)" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["/nowhere/model", "models/small/model", "small--model"])
def test_a_model_that_is_not_there_is_told_in_one_line(
    missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(["--model-path", missing]) == 2
    said = capsys.readouterr().err
    assert f"error: --model-path {missing}: there is no such directory" in said


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Hugging Face's hub, which has no model but ``org/model``; the directory of its cache."""
    from huggingface_hub import constants

    def answer(call: Call) -> None:
        if call.path == "/api/models/org/model":
            call.answer(200, b'{"id": "org/model"}')
        else:
            call.answer(404, b"{}", x_error_code="RepoNotFound")

    with web_server(answer) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield tmp_path


@pytest.mark.parametrize("name", ["small-modle", "org/modle"])
def test_a_name_that_is_no_model_is_told_at_once(hub: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"--model-path {name}: .* shows no such model"):
        set_up_platform(name)


def test_a_model_that_the_hub_or_the_cache_has_goes_on_to_sglang(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    set_up_platform("org/model")
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match="cannot be reached"):
        set_up_platform("org/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        set_up_platform("org/model")
    kept = hub / "models--org--model" / "snapshots" / "0"
    kept.mkdir(parents=True)
    (kept / "config.json").touch()
    set_up_platform("org/model")


def test_a_route_that_refuses_unknown_fields_is_known_to() -> None:
    """Its marks are taken out."""
    from sglang.srt.entrypoints.http_server import app

    routes = list(leaves(app.routes))
    strict = {
        route.path
        for route in routes
        for field in getattr(getattr(route, "dependant", None), "body_params", ())
        if getattr(field.field_info.annotation, "model_config", {}).get("extra") == "forbid"
    }
    assert strict & MARKED_PATHS == set(STRICT_PATHS) & {route.path for route in routes}
