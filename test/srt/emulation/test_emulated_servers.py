"""Both servers on an emulated GPU in real time, by the commands that ``make-model`` prints."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from openai import OpenAI

from sglang_coserve.local_server import LocalServer
from sglang_coserve.srt.emulation.model_directory import make_emulated_model, stock_command
from sglang_coserve.srt.emulation.settings import Emulation

EMULATED = Emulation.of("llama-3.1-8b", "h100")
NAME = "emulated-llama-3.1-8b-h100"
pytestmark = pytest.mark.heavy

READY_S = 300.0
SMALL = ("--max-running-requests", "16", "--max-total-tokens", "8192")
"""So that a test takes little memory."""


def stock_server(model: Path, log_path: Path) -> LocalServer:
    """SGLang's own, by the printed command: variables, ``python -m MODULE`` and flags."""
    words = shlex.split(stock_command(model))
    python = words.index("python")
    assert words[python + 1 : python + 3] == ["-m", "sglang.launch_server"]
    return LocalServer(
        [*words[python + 3 :], *SMALL],
        module="sglang.launch_server",
        log_path=log_path,
        ready_timeout_s=READY_S,
        extra_env=dict(word.split("=", 1) for word in words[:python]),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("emulated")
    return make_emulated_model(directory, EMULATED, vocab=1024, context=2048)


@contextmanager
def asked(server: LocalServer) -> Iterator[tuple[str, int]]:
    """The text and the number of output tokens of a chat completion."""
    with server, OpenAI(base_url=f"{server.base_url}/v1", api_key="none", timeout=120) as client:
        assert [one.id for one in client.models.list()] == [NAME]
        answer = client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "Where is no GPU?"}],
            max_tokens=12,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        yield answer.choices[0].message.content or "", answer.usage.completion_tokens


@pytest.fixture(scope="module")
def stock_answer(model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    log = tmp_path_factory.mktemp("stock") / "server.log"
    with asked(stock_server(model, log)) as (text, tokens):
        assert tokens == 12
        assert f"EMULATED: no GPU computes here: {NAME}" in log.read_text()
    return text


def test_ours_serves_it_with_the_gpus_limits_and_says_what_it_is(
    model: Path, stock_answer: str, tmp_path: Path
) -> None:
    server = LocalServer(
        ["--model-path", str(model), "--startup-profile-seconds", "1", *SMALL],
        log_path=tmp_path / "server.log",
        ready_timeout_s=READY_S,
    )
    with asked(server) as (text, tokens):
        assert (text, tokens) == (stock_answer, 12)
        status = httpx2.get(f"{server.base_url}/coserve/status", timeout=30).json()
        assert status["emulated"] == NAME
        assert status["replicas"][0]["safepoints"]["enabled"]
        info = httpx2.get(f"{server.base_url}/get_server_info", timeout=30).json()
        assert info["chunked_prefill_size"] == 8192
        assert not info["disable_overlap_schedule"]
        assert (
            f"EMULATED: no GPU computes here, and figures are not of one: {NAME}"
            in (tmp_path / "server.log").read_text()
        )
