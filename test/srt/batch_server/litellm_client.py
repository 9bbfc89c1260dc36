"""Ten lines through LiteLLM, its SDK and its proxy; run by path, with LiteLLM's own packages."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import litellm
import openai
from litellm.proxy.batches_endpoints.litellm_executed_batches import upstream_lacks_files_api

COUNT, GIVE_UP_S = 10, 90
ENDPOINT: Any = "/v1/chat/completions"


def content() -> bytes:
    """The input."""
    body = {"model": "small", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 3}
    fields = {"method": "POST", "url": ENDPOINT, "body": body}
    lines = ({"custom_id": f"id-{n}"} | fields for n in range(COUNT))
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def check(batch: Any, retrieve: Callable[[], Any], text: Callable[[Any], str]) -> None:
    """Wait for a batch, and check what LiteLLM makes of it."""
    end_s = time.monotonic() + GIVE_UP_S
    while batch.status not in ("completed", "failed"):
        assert time.monotonic() < end_s, batch
        time.sleep(0.2)
        batch = retrieve()
    assert (batch.request_counts.completed, batch.request_counts.failed) == (COUNT, 0), batch
    assert batch.model == "small", batch
    assert batch.usage.total_tokens == batch.usage.input_tokens + 3 * COUNT, batch
    assert len(text(batch).splitlines()) == COUNT


def use_sdk(base_url: str, api_key: str) -> None:
    """Files and batches by the SDK's functions."""
    for provider in ("hosted_vllm", "openai"):
        there: Any = {"custom_llm_provider": provider, "api_base": base_url, "api_key": api_key}
        file = litellm.create_file(file=("in.jsonl", content()), purpose="batch", **there)
        batch: Any = litellm.create_batch(
            completion_window="24h", endpoint=ENDPOINT, input_file_id=file.id, **there
        )
        check(
            batch,
            lambda batch=batch, there=there: litellm.retrieve_batch(batch.id, **there),
            lambda batch, there=there: litellm.file_content(batch.output_file_id, **there).text,
        )


def use_proxy(base_url: str, api_key: str, directory: Path) -> None:
    """The same, and an online request, through a proxy."""
    with proxy(base_url, api_key, directory) as client:
        chat = client.chat.completions.create(
            model="small", messages=[{"role": "user", "content": "Who?"}], max_tokens=3
        )
        assert chat.choices[0].message.content
        file = client.files.create(file=("in.jsonl", content()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h"
        )
        check(
            batch,
            lambda: client.batches.retrieve(batch.id),
            lambda batch: client.files.content(batch.output_file_id).text,
        )


@contextmanager
def proxy(base_url: str, api_key: str, directory: Path) -> Generator[openai.OpenAI]:
    """A proxy of the server at ``base_url``, and a client of it."""
    model = {"model": "hosted_vllm/small", "api_base": base_url, "api_key": api_key}
    config = directory / "config.yaml"  # JSON is YAML.
    config.write_text(
        json.dumps({"model_list": [{"model_name": "small", "litellm_params": model}]})
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    key = f"sk-{secrets.token_hex(16)}"
    program = "from litellm.proxy.proxy_cli import run_server; run_server()"
    command = [sys.executable, "-c", program, "--config", str(config), "--host", "127.0.0.1"]
    with subprocess.Popen(
        [*command, "--port", port], env={**os.environ, "LITELLM_MASTER_KEY": key}
    ) as process:
        try:
            wait_for(process, int(port))
            headers = {"x-litellm-model": "small"}
            url = f"http://127.0.0.1:{port}/v1"
            with openai.OpenAI(
                base_url=url, api_key=key, default_headers=headers, max_retries=0, timeout=60
            ) as client:
                yield client
        finally:
            process.terminate()


def wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait until the proxy listens."""
    end_s = time.monotonic() + GIVE_UP_S
    while True:
        assert process.poll() is None
        assert time.monotonic() < end_s
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.2)
        else:
            return


def main(_name: str, base_url: str, api_key: str, without: str, directory: str) -> None:
    """Run all of it; ``without`` is the address of a server that has no Batch API."""
    assert not asyncio.run(upstream_lacks_files_api(base_url, api_key))
    assert asyncio.run(upstream_lacks_files_api(without, api_key))
    use_sdk(base_url, api_key)
    use_proxy(base_url, api_key, Path(directory))


if __name__ == "__main__":
    main(*sys.argv[1:])
