"""The bundled samples are what their readers expect."""

import json

import pytest

from sglang_coserve.workload.trace import detect_format, read_trace, sample_path


@pytest.fixture(scope="module")
def online():
    return list(read_trace(sample_path("online")))


@pytest.fixture(scope="module")
def offline():
    return [json.loads(line) for line in sample_path("offline").read_text().splitlines()]


def test_they_are_small():
    assert sum(sample_path(name).stat().st_size for name in ("online", "offline")) < 600_000


class TestOnline:
    def test_is_ten_minutes_at_about_one_request_per_second(self, online):
        assert detect_format(sample_path("online")).name == "azure"
        assert 570 < online[-1].arrival_s < 600
        assert 0.8 < len(online) / 600 < 1.2


class TestOffline:
    def test_lines_are_openai_batch_requests(self, offline):
        assert len(offline) == 400
        assert len({line["custom_id"] for line in offline}) == 400
        for line in offline:
            assert set(line) == {"custom_id", "method", "url", "body"}
            assert (line["method"], line["url"]) == ("POST", "/v1/chat/completions")
            body = line["body"]
            assert set(body) == {"model", "messages", "max_tokens", "temperature"}
            assert (body["model"], body["temperature"]) == ("default", 0)
            assert 16 <= body["max_tokens"] <= 64
            roles = [message["role"] for message in body["messages"]]
            assert roles == ["system", *["user", "assistant"] * (len(roles) // 2 - 1), "user"]
