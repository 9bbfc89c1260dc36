"""A file and the environment as settings of a command; the command line wins."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from sglang_coserve.config.config_file import Settings
from sglang_coserve.errors import ConfigError
from sglang_coserve.fleet.options import parse_options

FILE = """
data-dir: data
port: 4000
engine: [http://a:1, http://b:1]
engine-admin-key: secret
batch-max-lines: 7
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("COSERVE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "coserve.yaml"
    path.write_text(FILE)
    return str(path)


def test_the_documented_file_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs" / "operations.md").read_text()
    path = tmp_path / "coserve.yaml"
    path.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    monkeypatch.setenv("COSERVE_ENGINE_ADMIN_KEY", "secret")
    found = parse_options(["--config", str(path)])
    assert len(found.engine) == 2


def test_the_environment_wins_over_the_file_and_flags_win_over_both(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = parse_options(["--config", file])
    assert (found.port, found.data, found.batch_max_lines) == (4000, Path("data"), 7)
    assert found.engine == ["http://a:1", "http://b:1"]
    monkeypatch.setenv("COSERVE_CONFIG", file)
    monkeypatch.setenv("COSERVE_PORT", "5000")
    monkeypatch.setenv("COSERVE_DATA_DIR", "elsewhere")
    monkeypatch.setenv("COSERVE_ENGINE", "http://c:1 http://d:1")
    monkeypatch.setenv("COSERVE_API_KEY", "-key")
    monkeypatch.setenv("COSERVE_OF_SOMETHING_ELSE", "1")
    found = parse_options([])
    assert (found.port, found.data, found.api_key) == (5000, Path("elsewhere"), "-key")
    assert found.engine == ["http://c:1", "http://d:1"]
    found = parse_options(["--port", "6000", "--engine=http://e:1"])
    assert found.port == 6000
    assert found.engine == ["http://e:1"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("prot: 1", "no setting 'prot': did you mean port?"),
        ("model-path: m", "no setting 'model_path'"),
        ("batch-max-lines: true", "batch_max_lines cannot be True"),
        ("host: [a, b]", "host"),
        ("port:", "port cannot be None"),
        ("port: [", "not YAML"),
        ("[gateway]", "write a mapping"),
        ("1: 2", "write a mapping"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "coserve.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=says):
        parse_options(["--config", str(path)])
    with pytest.raises(ConfigError, match=r"missing.yaml: cannot be read"):
        parse_options(["--config", str(tmp_path / "missing.yaml")])


def test_every_kind_of_flag_can_be_set(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--many", nargs="+", type=int)
    parser.add_argument("--turn-on", action="store_true")
    parser.add_argument("--turn-off", action="store_true")
    parser.add_argument("--rate", "-r", type=float, required=True)
    path = tmp_path / "coserve.yaml"
    parser.add_argument("--object", "--other")
    parser.add_argument("--told", type=lambda text: text == "true")
    parser.add_argument("--either", action=argparse.BooleanOptionalAction, default=True)
    argv = ["--config", str(path)]
    path.write_text(
        "many: [1, 2]\nturn-on: true\nturn-off: false\nrate: 0.5\neither: false\n"
        "other: {a: [1]}\ntold: true\n"
    )
    found = parser.parse_args(Settings(argv).command_line(parser))
    assert (found.many, found.turn_on, found.turn_off, found.rate) == ([1, 2], True, False, 0.5)
    assert (found.either, found.object, found.told) == (False, '{"a": [1]}', True)
    found = parser.parse_args(Settings(["-r", "2", *argv]).command_line(parser))
    assert found.rate == 2.0


@pytest.mark.parametrize(
    "content",
    ["api-key: @hunter2", 'api-key: "hunter2', "api-key: hunter2: b", "api-key: 2024-99-99"],
)
def test_an_error_quotes_no_key(content: str, tmp_path: Path) -> None:
    path = tmp_path / "coserve.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match="not YAML") as caught:
        parse_options(["--config", str(path)])
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("value", ["0123", "12:30", "yes", "2024-01-01"])
def test_a_text_that_yaml_reads_as_something_else_needs_quotes(value: str, tmp_path: Path) -> None:
    path = tmp_path / "coserve.yaml"
    path.write_text(f"api-key: {value}")
    with pytest.raises(ConfigError, match=r"api_key cannot be such a value: .* needs quotes"):
        parse_options(["--config", str(path)])
    path.write_text(f"api-key: '{value}'")
    parser = argparse.ArgumentParser()
    parser.add_argument("--api-key")
    argv = Settings(["--config", str(path)]).command_line(parser)
    assert parser.parse_args(argv).api_key == value


def test_off_is_a_choice_where_a_flag_has_it(tmp_path: Path) -> None:
    path = tmp_path / "coserve.yaml"
    path.write_text("kv-checkpoint: off\n")
    parser = argparse.ArgumentParser()
    parser.add_argument("--kv-checkpoint", choices=("off", "eager"))
    argv = Settings(["--config", str(path)]).command_line(parser)
    assert parser.parse_args(argv).kv_checkpoint == "off"


def test_one_file_alone_can_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--config is given 2 times"):
        Settings(["--config", "a.yaml", "--config=b.yaml"])


def test_an_empty_variable_says_nothing(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSERVE_PORT", "")
    assert Settings(["--config", file]).one("port") == "4000"


def test_values_with_spaces_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slo", nargs="+", action="extend")
    parser.add_argument("--lora-paths", nargs="*")
    path = tmp_path / "coserve.yaml"

    def found(name: str = "slo") -> list[str]:
        settings = Settings(["--config", str(path)])
        return getattr(parser.parse_args(settings.command_line(parser)), name)

    ttft, tpot = "ttft p99 <= 300ms", "tpot mean <= 50ms"
    path.write_text(f"slo: {ttft}")
    assert found() == [ttft]
    path.write_text(f"slo: ['{ttft}', '{tpot}']")
    assert found() == [ttft, tpot]
    monkeypatch.setenv("COSERVE_SLO", f"'{ttft}' '{tpot}'")
    assert found() == [ttft, tpot]
    monkeypatch.setenv("COSERVE_SLO", f"'{ttft}")
    with pytest.raises(ConfigError, match=r"COSERVE_SLO: .* single quote without its partner"):
        found()
    monkeypatch.delenv("COSERVE_SLO")
    monkeypatch.setenv("COSERVE_LORA_PATHS", r'{"lora_name":"a","lora_path":"\u0062"} c=d')
    assert found("lora_paths") == [r'{"lora_name":"a","lora_path":"\u0062"}', "c=d"]


def test_a_file_may_be_a_pipe() -> None:
    """As with ``--config <(decrypt settings.yaml)``: it can be read once."""
    reader, writer = os.pipe()
    os.write(writer, b"model: m\nhost: h\n")
    os.close(writer)
    settings = Settings(["--config", f"/dev/fd/{reader}"])
    os.close(reader)
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", "--model")
    parser.add_argument("--host")
    assert settings.one("model_path", "model") == "m"
    assert settings.command_line(parser) == ["--model-path=m", "--host=h"]


def test_a_file_that_is_not_named_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="--config: expected one argument"):
        Settings(["--config"])


def test_the_address_of_a_service_is_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSERVE_ENGINE_ADMIN_KEY", "secret")
    monkeypatch.setenv("COSERVE_PORT", "tcp://10.0.0.1:30000")
    arguments = ["--engine", "http://a:1", "--coserve-data-dir", "data"]
    assert parse_options(arguments).port == parse_options([*arguments, "--port", "30000"]).port
    assert Settings([]).one("port") is None
    monkeypatch.setenv("COSERVE_PORT", "tcp:4000")
    with pytest.raises(ConfigError, match="tcp:4000"):
        parse_options(arguments)
