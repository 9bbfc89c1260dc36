"""Reading the three trace formats: what they say, and every way a row can be wrong."""

import json
import math
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_coserve.errors import InputFileError
from sglang_coserve.workload.trace import TraceRequest, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.fixture
def trace(tmp_path):
    def write(content: str | bytes) -> Path:
        path = tmp_path / "trace"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def mooncake(**fields: object) -> str:
    return json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5} | fields) + "\n"


class TestFormats:
    def test_azure_2023_keeps_its_seventh_digit(self, trace):
        path = trace(
            AZURE.replace("TIMESTAMP", '"TIMESTAMP"')
            + "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:46.6805901,396,109"
        )
        assert list(read_trace(path)) == [
            TraceRequest(0, 0.0, 374, 44),
            TraceRequest(1, 1e-7, 396, 109),
        ]

    def test_azure_2024_has_offsets_and_drops_zero_fractions(self, trace):
        path = trace(
            AZURE
            + "2024-05-10 23:59:59.500000+00:00,10,1\n"
            + "2024-05-11 00:00:01+00:00,20,2\n"
            + "2024-05-11T02:00:02.25+02:00,30,3\n"
            + "2024-05-11T00:00:03Z,40,4\n"
        )
        assert [r.arrival_s for r in read_trace(path)] == [0.0, 1.5, 2.75, 3.5]

    def test_burstgpt(self, trace):
        path = trace(  # Release 3 has two more columns in between.
            "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens\n"
            "5,,0.7,ChatGPT,472,18,490\n"
            "45,,0.7,GPT-4,0,0,0\n"
            "118.25,,0.7,GPT-4,417,276,693\n"
        )
        assert list(read_trace(path)) == [
            TraceRequest(0, 0.0, 472, 18),
            TraceRequest(1, 40.0, 0, 0),
            TraceRequest(2, 113.25, 417, 276),
        ]

    def test_mooncake(self, trace):
        path = trace(
            mooncake(timestamp=1500, hash_ids=[0, 7])
            + mooncake(timestamp=3000.5)
            + mooncake(timestamp=4000, input_length=0, hash_ids=[])
        )
        assert list(read_trace(path)) == [
            TraceRequest(0, 0.0, 600, 5, (0, 7)),
            TraceRequest(1, 1.5005, 600, 5),
            TraceRequest(2, 2.5, 0, 5),
        ]

    def test_blank_lines_and_a_byte_order_mark_do_no_harm(self, trace):
        path = trace("\ufeff\n" + AZURE + "\n2023-11-16 18:15:46,1,2\n\n")
        assert list(read_trace(path)) == [TraceRequest(0, 0.0, 1, 2)]

    def test_equal_times_keep_the_order_of_the_file(self, trace):
        path = trace(mooncake(input_length=1) + mooncake(input_length=2))
        assert [r.prompt_tokens for r in read_trace(path)] == [1, 2]

    @given(
        rows=st.lists(
            st.tuples(st.integers(0, 10**11), st.integers(0, 10**6), st.integers(0, 10**4)),
            min_size=1,
        )
    )
    def test_written_as_azure_and_read_back(self, tmp_path_factory, rows):
        rows.sort()
        first_tick = rows[0][0]
        path = tmp_path_factory.mktemp("trace") / "trace.csv"
        midnight = datetime(2026, 1, 1)
        lines = [
            f"{midnight + timedelta(seconds=t // 10**7)}.{t % 10**7:07d},{p},{o}"
            for t, p, o in rows
        ]
        path.write_text("\n".join([AZURE.strip(), *lines]))
        assert list(read_trace(path)) == [
            TraceRequest(i, (t - first_tick) / 1e7, p, o) for i, (t, p, o) in enumerate(rows)
        ]


class TestMalformedRows:
    @pytest.mark.parametrize(
        ("row", "field"),
        [
            *(
                (AZURE + row, field)
                for row, field in (
                    ("yesterday,1,2", "TIMESTAMP"),
                    ("2023-02-30 10:00:00,1,2", "TIMESTAMP"),
                    ("2023-11-16 24:61:00,1,2", "TIMESTAMP"),
                    ("2023-11-16,1,2", "TIMESTAMP"),
                    ("2023-11-16 18:15:46.5 ,1,2", "TIMESTAMP"),
                    (",1,2", "TIMESTAMP"),
                    ("2023-11-16 18:15:46,-1,2", "ContextTokens"),
                    ("2023-11-16 18:15:46,1.5,2", "ContextTokens"),
                    ("2023-11-16 18:15:46,1_0,2", "ContextTokens"),
                    ("2023-11-16 18:15:46,²,2", "ContextTokens"),
                    ("2023-11-16 18:15:46,1,", "GeneratedTokens"),
                    ("2023-11-16 18:15:46,1," + "9" * 5000, "GeneratedTokens"),
                )
            ),
            (BURSTGPT + "-5,GPT-4,1,2,3,API log", "Timestamp"),
            (BURSTGPT + "nan,GPT-4,1,2,3,API log", "Timestamp"),
            (BURSTGPT + "1e3,GPT-4,1,2,3,API log", "Timestamp"),
            (BURSTGPT + "5,GPT-4,x,2,3,API log", "Request tokens"),
            (BURSTGPT + "5,GPT-4,1,-2,3,API log", "Response tokens"),
            *(
                (mooncake() + mooncake(**{field: value}), field)
                for field, values in {
                    "timestamp": (-1, "0", None, True, math.nan, math.inf, 10**400),
                    "input_length": (-1, 1.0, False, 10**12),
                    "output_length": ("5", None),
                    # 600 tokens are two blocks.
                    "hash_ids": (3, None, [0, -1], [2**63], [0, "1"], [0, 1, 2]),
                }.items()
                for value in values
            ),
            (mooncake() + '{"timestamp": 1, "input_length": 2}', "output_length"),
        ],
    )
    def test_a_field_is_named_with_its_line(self, trace, row, field):
        path = trace(f"{row}\n")
        with pytest.raises(InputFileError) as error:
            list(read_trace(path))
        assert str(error.value).startswith(f"{path}:2: {field}: expected ")
        assert len(str(error.value)) < 300 + len(str(path))

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (mooncake() + "{]\n", "2: not JSON"),
            (mooncake() + "[" * 100_000 + "\n", "2: not JSON"),
            (mooncake() + '{"timestamp": ' + "1" * 5000 + "}\n", "2: not JSON"),
            (mooncake() + "[1]\n", "2: not a JSON object"),
            (AZURE + "2023-11-16 18:15:46,1\n", "2: 2 fields where the header names 3"),
            (AZURE + "2023-11-16 18:15:46,1,2,3\n", "2: 4 fields where the header names 3"),
            (AZURE + '"2023-11-16 18:15:46"x,1,2\n', "2: not CSV"),
            (AZURE + '"2023-11-16 18:15:46,1,2\n', "2: not CSV"),
            (AZURE.encode() + b"2023-11-16 18:15:46,\xff\xfe,2\n", "2: ContextTokens"),
        ],
    )
    def test_broken_lines(self, trace, content, problem):
        path = trace(content)
        with pytest.raises(InputFileError) as error:
            list(read_trace(path))
        assert str(error.value).startswith(f"{path}:{problem}")

    @pytest.mark.parametrize(
        ("content", "field"),
        [
            (AZURE + "2023-11-16 18:15:46.5,1,2\n2023-11-16 18:15:46.4999999,1,2", "TIMESTAMP"),
            (BURSTGPT + "5,m,1,2,3,API log\n4.9,m,1,2,3,API log", "Timestamp"),
            (mooncake(timestamp=5) + mooncake(timestamp=4), "timestamp"),
        ],
    )
    def test_out_of_order(self, trace, content, field):
        with pytest.raises(InputFileError, match=f"{field}: .* earlier than the row before: sort"):
            list(read_trace(trace(content)))

    def test_rows_before_the_bad_one_are_delivered(self, trace):
        requests = read_trace(trace(mooncake(input_length=7) + "broken"))
        assert next(requests).prompt_tokens == 7
        with pytest.raises(InputFileError):
            next(requests)


class TestUnusableFiles:
    @pytest.mark.parametrize(
        "content",
        [
            "",
            "\n\n",
            "a,b,c\n1,2,3\n",
            '{"custom_id": "1"}\n',
            "[1, 2]\n",
            "5\n",
            # Field names of one format in the container of the other.
            '{"TIMESTAMP": 1, "ContextTokens": 2, "GeneratedTokens": 3}\n',
            "timestamp,input_length,output_length\n1,2,3\n",
            b"\x00\x01\xff" * 100,
        ],
    )
    def test_unknown_format(self, trace, content):
        with pytest.raises(InputFileError, match=r"unknown trace format, known are: azure \(csv"):
            read_trace(trace(content))

    @pytest.mark.parametrize("content", [AZURE, BURSTGPT + "\n"])
    def test_no_requests(self, trace, content):
        with pytest.raises(InputFileError, match="holds no request"):
            list(read_trace(trace(content)))

    def test_missing_file_and_folder(self, tmp_path):
        for path in (tmp_path / "missing.csv", tmp_path):
            with pytest.raises(InputFileError, match="cannot be read"):
                read_trace(path)
