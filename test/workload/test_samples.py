"""The bundled samples are what their readers expect."""

import itertools
import json
from collections import Counter
from statistics import mean, median

import numpy as np
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

    def test_lengths(self, online):
        prompts = [r.prompt_tokens for r in online]
        outputs = [r.output_tokens for r in online]
        assert 32 <= min(prompts) <= max(prompts) <= 1024
        assert 8 <= min(outputs) <= max(outputs) <= 128
        assert 160 < median(prompts) < 200
        assert 35 < median(outputs) < 45

    def test_is_bursty_in_both_ways(self, online):
        arrivals = np.array([r.arrival_s for r in online])
        busy = arrivals % 120 < 40
        assert 2.5 < (busy.sum() / 40) / ((~busy).sum() / 80) < 6
        gaps = np.diff(arrivals)
        assert gaps.std() / gaps.mean() > 1.3


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

    def test_prompts_are_short_english(self, offline):
        texts = [" ".join(m["content"] for m in line["body"]["messages"]) for line in offline]
        words = [len(text.split()) for text in texts]
        assert 100 <= min(words) <= max(words) <= 600
        assert all(text.isascii() for text in texts)

    def test_no_prompt_is_asked_twice(self, offline):
        assert len({json.dumps(line["body"]["messages"]) for line in offline}) == 400

    def test_ten_groups_share_most_of_their_prompt(self, offline):
        groups = Counter(json.dumps(line["body"]["messages"][:-1]) for line in offline)
        # The two summary groups share an instruction; their texts differ.
        assert sorted(groups.values()) == [40] * 8 + [80]
        shared = mean(
            len(json.dumps(m[:-1])) / len(json.dumps(m))
            for m in (line["body"]["messages"] for line in offline)
        )
        assert shared > 0.5

    def test_groups_are_mixed(self, offline):
        names = [line["custom_id"].rsplit("-", 1)[0] for line in offline]
        runs = 1 + sum(a != b for a, b in itertools.pairwise(names))
        assert runs > 300

    def test_few_shot_answers_are_right(self, offline):
        """An extracted register line is found, part by part, in its note."""
        seen = 0
        for line in offline:
            messages = line["body"]["messages"]
            if not line["custom_id"].startswith("extract"):
                continue
            for note, answer in zip(messages[1:-1:2], messages[2:-1:2], strict=True):
                for part in answer["content"].split("; "):
                    assert part.casefold() in note["content"].casefold()
                seen += 1
        assert seen == 2 * 40 * 5
