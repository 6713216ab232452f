"""Files of requests: what each format says, and what is refused, with file, line, field and value."""

import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from specstate import SpecStateError
from specstate.scheduler.lines import MAX_LINE_BYTES
from specstate.scheduler.readers import RequestReader
from specstate.scheduler.workloads import MAX_REQUEST_LEN, TracedRequest, WorkloadError, WorkloadOptions

MOONCAKE = (
    '{"timestamp": 3000, "input_length": 1030, "output_length": 500, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 3000, "input_length": 1024, "output_length": 3, "hash_ids": [0, 1]}\n'
    '{"timestamp": 6500.5, "input_length": 7, "output_length": 1, "hash_ids": [0]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 23:59:59.6805900,374,44\r\n"
    "2023-11-17 00:00:00.6805901,396,109\r\n"
    "2023-11-17 00:00:03,2,7"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,2162,5\n"
    "2024-05-10 00:00:00.017335+00:00,2399,6\n"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,GPT-4,1087,230,1317,API log\n"
)
BURSTGPT_3 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "19440110.0,0aa2c0de-0000-4000-8000-000000000001,43,GPT-4,906,446,1352,Conversation log\n"
    "19440110.25,,2,ChatGPT,36,29,65,API log\n"
)
OWN = (
    '{"arrival_ms": 0.5, "input_len": 40, "output_len": 9}\n'
    '{"arrival_ms": 2, "input_len": 40, "output_len": 9, "request_id": "a", "prefix_hashes": [7, "x"],'
    ' "block_size": 32}\n'
)


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "requests"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(folder: Path, content: str | bytes, **options: Any) -> list[TracedRequest]:
    return list(RequestReader(write(folder, content), WorkloadOptions(**options)))


def refusal(folder: Path, content: str | bytes, **options: Any) -> str:
    """What the error says behind the file's name."""
    with pytest.raises(WorkloadError) as raised:
        read(folder, content, **options)
    message = str(raised.value)
    assert message.startswith(str(folder / "requests")) and "\n" not in message
    return message.removeprefix(str(folder / "requests"))


# -- formats


def test_mooncake(tmp_path: Path) -> None:
    assert read(tmp_path, MOONCAKE) == [
        TracedRequest("1", 0.0, 1030, 500, (0, 1, 2), 512),
        TracedRequest("2", 0.0, 1024, 3, (0, 1), 512),
        TracedRequest("3", 3500.5, 7, 1, (0,), 512),
    ]


def test_azure_with_seven_digits_carriage_returns_and_no_last_newline(tmp_path: Path) -> None:
    assert read(tmp_path, AZURE) == [
        TracedRequest("2", 0.0, 374, 44),
        TracedRequest("3", 1000.0001, 396, 109),
        TracedRequest("4", 3319.41, 2, 7),
    ]
    assert [request.arrival_ms for request in read(tmp_path, AZURE_2024)] == [0.0, 7.405]


def test_burstgpt_with_six_columns_and_with_eight(tmp_path: Path) -> None:
    assert read(tmp_path, BURSTGPT) == [TracedRequest("2", 0.0, 472, 18), TracedRequest("3", 40_000.0, 1087, 230)]
    assert read(tmp_path, BURSTGPT_3) == [TracedRequest("2", 0.0, 906, 446), TracedRequest("3", 250.0, 36, 29)]
    assert read(tmp_path, BURSTGPT.replace("45,", "4.5e1,"))[1].arrival_ms == 40_000.0


def test_our_own_format_reads_back_what_it_writes(tmp_path: Path) -> None:
    requests = read(tmp_path, OWN)
    assert requests == [TracedRequest("1", 0.0, 40, 9), TracedRequest("a", 1.5, 40, 9, (7, "x"), 32)]
    assert read(tmp_path, "".join(request.to_json_line() + "\n" for request in requests)) == requests


@pytest.mark.parametrize(
    ("content", "name"), [(MOONCAKE, "mooncake"), (AZURE, "azure"), (BURSTGPT, "burstgpt"), (OWN, "specstate")]
)
def test_the_format_is_found_by_content_or_given(tmp_path: Path, content: str, name: str) -> None:
    assert RequestReader(write(tmp_path, content)).format == name
    assert read(tmp_path, content, format=name) == read(tmp_path, content)
    other = "azure" if name != "azure" else "mooncake"
    assert ", line 1: " in refusal(tmp_path, content, format=other)


def test_blank_lines_and_a_byte_order_mark_are_no_lines(tmp_path: Path) -> None:
    content = "\ufeff" + AZURE.replace("\r\n", "\r\n\r\n") + "\n\n \n"
    assert [request.input_len for request in read(tmp_path, content)] == [374, 396, 2]


# -- options


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    assert len(read(tmp_path, MOONCAKE, limit=2)) == 2
    assert len(read(tmp_path, MOONCAKE + "damage", limit=3)) == 3


def test_lengths_are_scaled_up_to_whole_tokens(tmp_path: Path) -> None:
    short = read(tmp_path, MOONCAKE, length_factor=0.001)
    assert [(request.input_len, request.output_len) for request in short] == [(2, 1), (2, 1), (1, 1)]
    assert [request.prefix_hashes for request in short] == [(0,), (0,), (0,)]
    half = read(tmp_path, MOONCAKE, length_factor=0.5)
    assert [(request.input_len, request.prefix_hashes) for request in half] == [(515, (0, 1)), (512, (0,)), (4, (0,))]
    longer = read(tmp_path, MOONCAKE.replace("1030", "1100"), length_factor=1.1)  # in floats 1100 * 1.1 is above 1210
    assert [(request.input_len, request.output_len) for request in longer] == [(1210, 550), (1127, 4), (8, 2)]
    assert longer[0].prefix_hashes == (0, 1, 2)
    assert "line 1: an input of 1030 tokens times length_factor = 100000.0 exceeds" in refusal(
        tmp_path, MOONCAKE, length_factor=1e5
    )


def test_blocks_are_scaled_with_lengths_so_that_what_is_shared_stays(tmp_path: Path) -> None:
    small = read(tmp_path, MOONCAKE, length_factor=1 / 64, scale_blocks=True)
    assert [(request.input_len, request.block_size) for request in small] == [(17, 8), (16, 8), (1, 8)]
    assert [request.prefix_hashes for request in small] == [(0, 1, 2), (0, 1), (0,)]
    for factor in (0.1, 1e-3, 1 / 1024):
        assert f"line 1: a block of 512 tokens times length_factor = {factor} is no whole number" in refusal(
            tmp_path, MOONCAKE, length_factor=factor, scale_blocks=True
        )


def test_arrivals_are_scaled(tmp_path: Path) -> None:
    assert [request.arrival_ms for request in read(tmp_path, MOONCAKE, rate_factor=2.0)] == [0.0, 0.0, 1750.25]
    late = MOONCAKE.replace("6500.5", "1e12")
    assert "line 3: timestamp = 1000000000000.0 is" in refusal(tmp_path, late, rate_factor=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"limit": 0},
        {"limit": 2.0},
        {"length_factor": 0.0},
        {"length_factor": float("nan")},
        {"rate_factor": -1.0},
        {"rate_factor": float("inf")},
        {"format": "csv"},
        {"skip_bad": 1},
        {"unknown": 1},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(options))):
        WorkloadOptions(**options)


# -- damage


MOONCAKE_FAULTS = [
    ("3000", "-1", "timestamp = -1"),
    ("3000", "NaN", "not JSON"),
    ("3000", "1e400", "timestamp = "),
    ("3000", "1e14", "timestamp = 100000000000000.0"),
    ("3000", '"3000"', "timestamp = '3000'"),
    ("3000", "true", "timestamp = True"),
    ("3000", "7000", "timestamp = 3000.0 is before 7000.0"),
    ('"timestamp"', '"time"', "timestamp is missing"),
    ("1030", "0", "input_length = 0"),
    ("1030", "-3", "input_length = -3"),
    ("1030", "1030.0", "input_length = 1030.0"),
    ("1030", str(MAX_REQUEST_LEN + 1), f"input_length = {MAX_REQUEST_LEN + 1}"),
    ("1030", "9" * 400, "input_length = 9999"),
    ("1030", "null", "input_length = None"),
    ("1030", "1024", "hash_ids has 3 entries, input_length = 1024 has 2 blocks of 512 tokens"),
    ("500", '"x"', "output_length = 'x'"),
    ("[0, 1, 2]", "[0, 1.5, 2]", "hash_ids.1 = 1.5"),
    ("[0, 1, 2]", "5", "hash_ids = 5"),
    ("[0, 1, 2]", f"[{2**63}]", "hash_ids.0 = "),
    ("[0, 1, 2]}", '[0], "more": 1}', "more = 1"),
]


@pytest.mark.parametrize(("old", "new", "what"), MOONCAKE_FAULTS, ids=[what[:40] for *_, what in MOONCAKE_FAULTS])
def test_a_bad_json_field_is_named(tmp_path: Path, old: str, new: str, what: str) -> None:
    message = refusal(tmp_path, MOONCAKE.replace(old, new, 1))
    assert message.startswith(", line 2: " if "before" in what else ", line 1: ")
    assert what in message


OWN_FAULTS = [
    ('"a"', '""', "request_id = ''"),
    ('"a"', "3", "request_id = 3"),
    ('"x"', '""', "prefix_hashes.1 = '': must be an integer within int64, or a string that is not empty"),
    ('"x"', "null", "prefix_hashes.1 = None: must be"),
    ('"x"', "true", "prefix_hashes.1 = True: must be"),
    ('"x"', str(2**63), "prefix_hashes.1 = 9223372036854775808: must be"),
    ('"x"', r'"\ud800"', "line 2: "),
    ("32", "0", "block_size = 0"),
    ("32", "64", "prefix_hashes has 2 entries, input_len = 40 has 1 blocks of 64 tokens"),
]


@pytest.mark.parametrize(("old", "new", "what"), OWN_FAULTS)
def test_a_bad_field_of_our_own_is_named(tmp_path: Path, old: str, new: str, what: str) -> None:
    message = refusal(tmp_path, OWN.replace(old, new, 1))
    assert message.startswith(", line 2: ") and what in message


CSV_FAULTS = [
    (BURSTGPT, "472", "0", 2, "Request tokens = 0 is outside 1..16777216"),
    (BURSTGPT, "472", "-472", 2, "Request tokens = -472 is outside"),
    (BURSTGPT, "472", "4_72", 2, "Request tokens = '4_72' is not a whole number"),
    (BURSTGPT, "472", "472.0", 2, "Request tokens = '472.0' is not a whole number"),
    (BURSTGPT, "472", "٤٧٢", 2, "Request tokens = '٤٧٢' is not a whole number"),
    (BURSTGPT, "472", "9" * 5000, 2, "Request tokens = '9999"),
    (BURSTGPT, "472", "", 2, "Request tokens = '' is not a whole number"),
    (BURSTGPT, "18", "0", 2, "Response tokens = 0 is outside"),
    (BURSTGPT, "18", str(2**40), 2, "Response tokens = 1099511627776 is outside"),
    (BURSTGPT, "45", "4", 3, "Timestamp = '4' is before '5', the request above it"),
    (BURSTGPT, "45", "nan", 3, "Timestamp = 'nan' is not a number of seconds"),
    (BURSTGPT, "45", "inf", 3, "Timestamp = 'inf' is not a number of seconds"),
    (BURSTGPT, "45", "-4", 3, "Timestamp = '-4' is outside 0.."),
    (BURSTGPT, "45", "4e55", 3, "Timestamp = '4e55' is outside 0.."),
    (BURSTGPT, ",API log", "", 3, "5 columns, the header has 6"),
    (BURSTGPT, "API log", "API,log", 3, "7 columns, the header has 6"),
    (BURSTGPT, "API log", '"API', 3, "not CSV"),
    (BURSTGPT, "Request tokens", "Prompt tokens", 1, "column Request tokens is missing"),
    (BURSTGPT, "Model", "Kind", 1, "column 'Kind' is none of this format"),
    (BURSTGPT, "Model", "Timestamp", 1, "column 'Timestamp' is there twice"),
    (BURSTGPT, "T", "\ufeff\ufeffT", 1, "column Timestamp is missing"),
    (AZURE, ",GeneratedTokens", "", 1, "column GeneratedTokens is missing: there are 'TIMESTAMP', 'ContextTokens'"),
    (AZURE, "2023-11-16 ", "16.11.2023 ", 2, "TIMESTAMP = '16.11.2023 23:59:59.6805900' is not a time like"),
    (AZURE, "2023-11-16", "2023-11-31", 2, "TIMESTAMP = '2023-11-31 23:59:59.6805900' is not a time like"),
    (AZURE, "59.6805900", "59.6805900+02:00", 2, "is not a time like"),
    (AZURE, "2023-11-16", "1969-11-16", 2, "is outside 0.."),
    (AZURE, "00:00:03", "00:00:00", 4, "TIMESTAMP = '2023-11-17 00:00:00' is before '2023-11-17 00:00:00.6805901'"),
    (AZURE, "00:00:03,2,7", "00:0", 4, "1 columns, the header has 3 (the file ends inside this line"),
    ("a,b\n1,2\n", "a", "a", 1, "'a,b' is of no known format (azure: "),
    ('{"a": 1}\n', "a", "a", 1, "is of no known format (mooncake: "),
    ("[]\n", "[", "[", 1, "'[]' is of no known format (azure: "),
]


@pytest.mark.parametrize(
    ("content", "old", "new", "number", "what"), CSV_FAULTS, ids=[what[:40] for *_, what in CSV_FAULTS]
)
def test_a_bad_column_is_named(tmp_path: Path, content: str, old: str, new: str, number: int, what: str) -> None:
    message = refusal(tmp_path, content.replace(old, new, 1))
    assert message.startswith(f", line {number}: ")
    assert what in message


def test_a_torn_line_is_told_from_a_bad_one(tmp_path: Path) -> None:
    message = refusal(tmp_path, MOONCAKE[:-20])
    assert message.startswith(", line 3: ") and message.endswith("(the file ends inside this line, without a newline)")
    assert "newline" not in refusal(tmp_path, MOONCAKE.replace("[0, 1]}", "[0, 1"))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", ": is empty"),
        (b"\r\n\n", ": is empty"),
        (b"\xff\xfe\n", ", line 1: not UTF-8 at byte 1"),
        (MOONCAKE.encode() + b"ab\xc3\n", ", line 4: not UTF-8 at byte 3"),
        (MOONCAKE.encode() + b"ab\0cd\n", ", line 4: byte 3 is NUL"),
        (MOONCAKE.encode() + b"x" * (MAX_LINE_BYTES + 1) + b"\n", f", line 4: longer than {MAX_LINE_BYTES} bytes"),
        (AZURE.splitlines()[0].encode(), ": has no request"),
    ],
)
def test_what_is_no_text_of_requests_is_refused(tmp_path: Path, content: bytes, what: str) -> None:
    assert refusal(tmp_path, content).startswith(what)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"absent: cannot be read: No such file"):
        RequestReader(tmp_path / "absent")
    with pytest.raises(WorkloadError, match=r"cannot be read: Is a directory"):
        RequestReader(tmp_path)
    with pytest.raises(WorkloadError, match=r"cannot be read: embedded null byte"):
        RequestReader("a\0b")
    with pytest.raises(WorkloadError, match="path must be a path, not int"):
        RequestReader(0)  # type: ignore[arg-type]
    with pytest.raises(SpecStateError, match="options must be WorkloadOptions, not dict"):
        RequestReader(tmp_path, {"limit": 1})  # type: ignore[arg-type]


def test_bad_lines_are_counted_and_passed_over(tmp_path: Path) -> None:
    good = MOONCAKE.splitlines()
    bad = ["{", "ab\0cd", good[0].replace("500", "0"), "x" * (3 * MAX_LINE_BYTES), good[0], *["[]"] * 4]
    reader = RequestReader(
        write(tmp_path, "\n".join([good[0], good[2], *bad, good[2], "torn"])), WorkloadOptions(skip_bad=True)
    )
    assert [request.request_id for request in reader] == ["1", "2", "12"]
    assert reader.skipped.count == 10
    assert len(reader.skipped.first) == 5
    assert "line 3: " in reader.skipped.first[0]
    assert "line 5: output_length = 0" in reader.skipped.first[2]
    assert f"line 6: longer than {MAX_LINE_BYTES} bytes" in reader.skipped.first[3]
    assert "line 7: timestamp = 3000.0 is before 6500.5" in reader.skipped.first[4]


def test_a_file_of_bad_lines_alone_has_no_request(tmp_path: Path) -> None:
    message = refusal(tmp_path, BURSTGPT.replace("472", "0").replace("1087", "0"), skip_bad=True)
    assert message.startswith(": has no request, and 2 bad lines: ") and "line 2: Request tokens = 0" in message
    # What the columns mean is not guessed, whatever is skipped.
    assert ", line 1: column Request tokens is missing" in refusal(
        tmp_path, BURSTGPT.replace("Request tokens", "x"), skip_bad=True
    )


def test_a_reader_closes_its_file(tmp_path: Path) -> None:
    with RequestReader(write(tmp_path, MOONCAKE)) as reader:
        next(reader)
    assert list(reader) == []
    assert reader._file._file.closed


def test_a_long_file_is_never_held(tmp_path: Path) -> None:
    head, row = BURSTGPT.splitlines()[:2]
    path = write(tmp_path, f"{head}\n" + f"{row}\n" * 5_000)
    tracemalloc.start()
    assert sum(1 for _ in RequestReader(path)) == 5_000
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 150_000 < path.stat().st_size


# -- a request


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"input_len": 0}, "input_len = 0 is outside 1..16777216"),
        ({"output_len": True}, "output_len = True is outside"),
        ({"block_size": 2**25}, "block_size = 33554432 is outside"),
        ({"arrival_ms": float("nan")}, "arrival_ms = nan is outside"),
        ({"arrival_ms": -0.1}, "arrival_ms = -0.1 is outside"),
        ({"prefix_hashes": (1, 2)}, "prefix_hashes has 2 entries, input_len = 5 has 1 blocks of 512"),
    ],
)
def test_a_request_that_cannot_be_is_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(SpecStateError, match=rf"TracedRequest: {what}"):
        TracedRequest(**{"request_id": "a", "arrival_ms": 0.0, "input_len": 5, "output_len": 5, **changes})


# -- the published files, where there are copies


@pytest.mark.skipif("SPECSTATE_TRACES" not in os.environ, reason="SPECSTATE_TRACES names no directory of traces")
@pytest.mark.parametrize(
    ("name", "form", "count", "input_tokens", "last_ms"),
    [
        ("mooncake_conversation.jsonl", "mooncake", 12_031, 144_793_823, 3_536_999.0),
        ("azure_llm_2023_conv.csv", "azure", 19_366, 22_361_870, 3_501_721.937),
        ("azure_llm_2023_code.csv", "azure", 8_819, 18_059_974, 3_435_948.056),
    ],
)
def test_a_published_trace_is_read_to_its_end(
    name: str, form: str, count: int, input_tokens: int, last_ms: float
) -> None:
    reader = RequestReader(Path(os.environ["SPECSTATE_TRACES"]) / name)
    requests = list(reader)
    assert reader.format == form
    assert len(requests) == count
    assert sum(request.input_len for request in requests) == input_tokens
    assert requests[-1].arrival_ms == last_ms
