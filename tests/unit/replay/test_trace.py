"""A trace is read in full, or refused with the number of the bad line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvpool.replay import trace_formats
from kvpool.replay.trace import read_trace
from kvpool.replay.trace_formats import MAX_LINE_CHARACTERS, TraceError, TraceRequest


def line(**fields: Any) -> str:
    return json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2], **fields})


def without(name: str) -> str:
    entry = json.loads(line())
    del entry[name]
    return json.dumps(entry)


BAD_LINES = {
    "not JSON": "{",
    "empty": "",
    "an array": "[]",
    "no input_length": without("input_length"),
    "no output_length": without("output_length"),
    "no hash_ids": without("hash_ids"),
    "input_length of text": line(input_length="600"),
    "input_length of truth": line(input_length=True),
    "input_length of nothing": line(input_length=0, hash_ids=[]),
    "output_length below nothing": line(output_length=-1),
    "output_length beyond all bounds": line(output_length=2**22),
    "input_length that is no whole number": line(input_length=600.5),
    "deep": "[" * 100_000,
    "a number of 5,000 digits": '{"input_length": ' + "9" * 5000 + "}",
    "long": '{"x": "' + "x" * MAX_LINE_CHARACTERS + '"}',
    "hash_ids of text": line(hash_ids=["1", "2"]),
    "hash_ids too few": line(hash_ids=[1]),
    "hash_ids too many": line(hash_ids=[1, 2, 3]),
    "hash_ids below zero": line(hash_ids=[1, -2]),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_errors_name_the_bad_line(case: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([line(), line(), BAD_LINES[case], line()]) + "\n")
    with pytest.raises(TraceError, match="line 3: ") as caught:
        read_trace(path)
    assert len(str(caught.value)) < 500
    if " " in case and case.split(maxsplit=1)[0] in json.loads(line()):
        assert case.split(maxsplit=1)[0] in str(caught.value)


def test_errors_name_the_line_where_a_compressed_file_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    whole = gzip.compress("\n".join(line(hash_ids=[i, 2**31 - i]) for i in range(2000)).encode())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=r"line \d+: truncated") as caught:
        read_trace(path)
    assert int(str(caught.value).split(" line ")[1].split(":")[0]) > 1
    path.write_bytes(b"not gzip")
    with pytest.raises(TraceError, match="line 1: truncated or damaged"):
        read_trace(path)


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with pytest.raises(TraceError, match="No such file"):
        read_trace(path)
    path.write_text("")
    with pytest.raises(TraceError, match="line 1: no requests"):
        read_trace(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match="not UTF-8"):
        read_trace(path)


CSV = {
    "Azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n",
    "BurstGPT": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,log\n",
}


@pytest.mark.parametrize("text", CSV.values(), ids=CSV)
def test_a_table_is_refused_with_its_columns_and_what_is_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match="line 1: no requests") as caught:
        read_trace(path)
    assert text.splitlines()[0] in str(caught.value)
    assert "hash_ids, input_length and output_length" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_byte_order_mark_is_skipped(name: str, tmp_path: Path) -> None:
    text = ("\ufeff" + line()).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert read_trace(tmp_path / name) == [TraceRequest(600, 5, (1, 2))]


def test_turns_of_sessions_and_whole_numbers_with_a_point_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        json.dumps({"session_id": "a", "delay": 5, "input_length": 600.0, "output_length": 5.0, "hash_ids": [1, 2]})
    )
    assert read_trace(path) == [TraceRequest(600, 5, (1, 2))]


def test_reads_plain_and_compressed_traces_up_to_the_limit(tmp_path: Path) -> None:
    text = "\n".join([line(), line(hash_ids=[1, 3])])
    plain, packed = tmp_path / "t.jsonl", tmp_path / "t.jsonl.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    assert read_trace(plain) == read_trace(packed) == [TraceRequest(600, 5, (1, 2)), TraceRequest(600, 5, (1, 3))]
    assert len(read_trace(plain, limit=1)) == 1


def test_tokens_repeat_their_blocks_id() -> None:
    assert TraceRequest(600, 5, (7, 9)).token_ids() == [7] * 512 + [9] * 88


def test_the_ids_of_all_requests_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_formats, "MAX_TRACE_IDS", 5)
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([line()] * 3))
    with pytest.raises(TraceError, match=r"line 3: hash_ids: .* more than 5 ids; use --limit"):
        read_trace(path)
    assert len(read_trace(path, limit=2)) == 2
