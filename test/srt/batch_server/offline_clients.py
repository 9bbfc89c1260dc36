"""What users' programs do with clients, most of them for offline work; run by path."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

COUNT, GIVE_UP_S = 10, 90
QUESTIONS = [f"Who repaired boat {number}?" for number in range(COUNT)]
MESSAGES: Any = [{"role": "user", "content": "Who repaired the boat?"}]
TIERS = ("auto", "default", "flex", "scale", "priority", "fast")


def openai(base_url: str, api_key: str, _directory: Path) -> None:
    """Every tier, a batch, and an answer in the background; with whatever version."""
    from openai import OpenAI

    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60) as client:
        _ask(client)
        _run_batch(client)
        _answer_in_the_background(client)


def _ask(client: Any) -> None:
    """Every tier is taken, and the answer names the one used."""
    for tier in TIERS:
        used = "flex" if tier == "flex" else "default"
        chat = client.chat.completions.create(
            model="small", messages=MESSAGES, max_tokens=2, service_tier=tier
        )
        assert chat.service_tier == used, (tier, chat)
        chunks = client.chat.completions.create(
            model="small", messages=MESSAGES, max_tokens=2, service_tier=tier, stream=True
        )
        assert {chunk.service_tier for chunk in chunks} == {used}, tier
        given: Any = {
            "model": "small",
            "input": "Who?",
            "max_output_tokens": 16,
            "service_tier": tier,
        }
        assert client.responses.create(**given).service_tier == used, tier
        events = client.responses.create(**given, stream=True)
        told = {event.response.service_tier for event in events if hasattr(event, "response")}
        assert told == {used}, (tier, told)


def _run_batch(client: Any) -> None:
    """A batch from upload to results."""
    body = {"model": "small", "messages": MESSAGES, "max_tokens": 3}
    fields = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    lines = [json.dumps({"custom_id": f"line-{n}", **fields}) for n in range(COUNT)]
    content = "\n".join(lines).encode()
    uploaded = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    _wait(lambda: client.batches.retrieve(batch.id).status)
    batch = client.batches.retrieve(batch.id)
    assert batch.request_counts.completed == COUNT, batch
    records = client.files.content(batch.output_file_id).text.splitlines()
    assert {json.loads(record)["custom_id"] for record in records} == {
        f"line-{n}" for n in range(COUNT)
    }
    assert batch.id in [listed.id for listed in client.batches.list()]
    client.files.delete(uploaded.id)


def _answer_in_the_background(client: Any) -> None:
    """A response that is polled, then deleted."""
    begun = client.responses.create(
        model="small", input="Who?", max_output_tokens=16, background=True, service_tier="flex"
    )
    _wait(lambda: client.responses.retrieve(begun.id).status, "completed", "incomplete")
    response = client.responses.retrieve(begun.id)
    assert (response.error, response.background) == (None, True)
    client.responses.delete(response.id)


def autobatcher(base_url: str, api_key: str, _directory: Path) -> None:
    """Responses, which it sends to the background and polls."""
    asyncio.run(_autobatcher(base_url, api_key))


async def _autobatcher(base_url: str, api_key: str) -> None:
    from autobatcher import BatchOpenAI

    client = BatchOpenAI(base_url=base_url, api_key=api_key, poll_interval_seconds=0.2)
    responses = await asyncio.gather(
        *(
            client.responses.create(model="small", input=text, max_output_tokens=12)
            for text in QUESTIONS
        )
    )
    assert {each.status for each in responses} <= {"completed", "incomplete"}
    assert {each.service_tier for each in responses} == {"flex"}
    await client.close()


def instructor(base_url: str, api_key: str, directory: Path) -> None:
    """A batch whose answers are objects."""
    from instructor.batch import BatchProcessor
    from pydantic import BaseModel

    class Answer(BaseModel):
        is_repaired: bool

    os.environ |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
    processor = BatchProcessor("openai/small", Answer)
    messages: list[list[dict[str, Any]]] = [[{"role": "user", "content": t}] for t in QUESTIONS]
    file = processor.create_batch_from_messages(
        messages, str(directory / "in.jsonl"), max_tokens=300, temperature=1.0
    )
    batch_id = processor.submit_batch(file)
    _wait(lambda: processor.get_batch_status(batch_id)["status"])
    results = processor.retrieve_results(batch_id)
    assert {one.custom_id for one in results} == {f"request-{n}" for n in range(COUNT)}
    assert all(one.success for one in results), results
    assert {type(one.result.is_repaired) for one in results} == {bool}
    # Of the newest only: it reads no batch without metadata, which those of others have not.
    assert batch_id in [listed.id for listed in processor.list_batches(1)]


def langchain_openai(base_url: str, api_key: str, _directory: Path) -> None:
    """Flex requests, as a whole and as streams."""
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="small",
        base_url=base_url,
        api_key=api_key,
        service_tier="flex",
        max_tokens=12,
        temperature=0.0,
        timeout=GIVE_UP_S,
    )
    answers = model.batch(QUESTIONS)
    assert [one.response_metadata["service_tier"] for one in answers] == ["flex"] * COUNT
    streamed = [chunk.text for chunk in model.stream(QUESTIONS[0])]
    assert "".join(streamed) == answers[0].text


def openai_batch(base_url: str, api_key: str, directory: Path) -> None:
    """A batch that is there: its ``submit`` reads a file that it has closed, whatever it is."""
    from openai_batch import Batch
    from openai_batch.providers import Provider

    provider = Provider(base_url=base_url, api_key=api_key)
    input_file = directory / "in.jsonl"
    with Batch(submission_input_file=input_file, provider=provider) as written:
        for text in QUESTIONS:
            message = {"role": "user", "content": text}
            written.add_to_batch(model="small", messages=[message], max_tokens=12)
        try:
            written.submit()
        except ValueError as error:
            assert "closed file" in str(error), error
        else:
            raise AssertionError("it submits now: let it")
    client = provider.get_client()
    file = client.files.create(file=input_file, purpose="batch")
    endpoint: Any = "/v1/chat/completions"
    created = client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h"
    )
    output = directory / "out.jsonl"
    batch = Batch(batch_id=created.id, provider=provider, output_file=output)
    _wait(lambda: batch.status().status)
    assert batch.download() == (output, None)
    assert len(output.read_text().splitlines()) == COUNT


def guidellm(base_url: str, api_key: str, directory: Path) -> None:
    """Streams of flex chats, measured."""
    backend = {
        "kind": "openai_http",
        "target": base_url,
        "model": "small",
        "api_key": api_key,
        "max_tokens": 12,
        "extras": {"body": {"service_tier": "flex"}},
    }
    report = directory / "report.json"
    _run(
        *("guidellm", "run", "--disable-console", "--backend", json.dumps(backend)),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={COUNT}"),
        *("--data", f"kind=json_file,path={_questions(directory, 'prompt')}"),
        *("--output", f"kind=json,path={report}"),
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    ended = benchmark["requests"]
    assert (len(ended["successful"]), len(ended["errored"])) == (COUNT, 0)
    assert all(1 <= one["output_tokens"] <= 12 for one in ended["successful"])


def aiperf(base_url: str, api_key: str, directory: Path) -> None:
    """Streams of flex chats, measured."""
    _run(
        *("aiperf", "profile", "--ui", "none", "--artifact-dir", str(directory)),
        *("-m", "small", "--tokenizer", str(directory / "model"), "--api-key", api_key),
        *("--url", base_url, "--endpoint-type", "chat", "--streaming"),
        *("--request-count", str(COUNT), "--concurrency", "2", "--custom-dataset-type"),
        *("single_turn", "--input-file", str(_questions(directory, "text"))),
        *("--extra-inputs", "service_tier:flex", "--extra-inputs", "max_tokens:12"),
    )
    report = json.loads((directory / "profile_export_aiperf.json").read_text())
    assert (report["request_count"]["avg"], report["error_summary"]) == (COUNT, [])
    assert COUNT <= report["total_usage_completion_tokens"]["avg"] <= 12 * COUNT


def _questions(directory: Path, field: str) -> Path:
    file = directory / "questions.jsonl"
    file.write_text("".join(json.dumps({field: text}) + "\n" for text in QUESTIONS))
    return file


def _run(program: str, *words: str) -> None:
    subprocess.run([Path(sys.executable).with_name(program), *words], check=True, timeout=300)


def _wait(status: Any, *ends: str) -> None:
    end_s = time.monotonic() + GIVE_UP_S
    while (seen := status()) not in (ends or ("completed",)):
        assert time.monotonic() < end_s and seen not in ("failed", "expired"), seen
        time.sleep(0.2)


def main(name: str, base_url: str, api_key: str, _without: str, directory: str) -> None:
    """Run what a client has here; its name is that of its package."""
    globals()[name.replace("-", "_")](base_url, api_key, Path(directory))


if __name__ == "__main__":
    main(*sys.argv[1:])
