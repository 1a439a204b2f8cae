"""Each format is known by the keys of its first entry; an error names entry and key."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvpool.replay.trace import read_trace
from kvpool.replay.trace_formats import TraceError, TraceRequest

OWN = {"timestamp": 1.5, "input_length": 40, "output_length": 3, "hash_ids": [7, 8, 9], "block_size": 16}
TOKENS = {"prompt_token_ids": [*range(16), 1, 2], "output_tokens": 4}
MESSAGES = {
    "messages": [
        {"role": "system", "content": "s" * 55},
        {"role": "user", "content": [{"type": "text", "text": "question"}, {"type": "image_url"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "answer"},
    ]
}
LOG = """INFO 11-27 10:00:00 [api_server.py:1] Starting
DEBUG 11-27 10:00:01 [request_logger.py:31] Request cmpl-1 details: prompt: 'prompt_token_ids: [9]', prompt_token_ids: \
[5, 6, 7], prompt_embeds shape: None.

INFO 11-27 10:00:01 [request_logger.py:40] Received request cmpl-1: params: SamplingParams(n=1), lora_request: None.
DEBUG 11-27 10:00:02 [request_logger.py:31] Request cmpl-2 details: prompt: None, prompt_token_ids: [5, 6, 7],
"""


def read(tmp_path: Path, text: str) -> list[TraceRequest]:
    path = tmp_path / "trace"
    path.write_text(text)
    return read_trace(path)


def read_lines(tmp_path: Path, *entries: object) -> list[TraceRequest]:
    return read(tmp_path, "\n".join(map(json.dumps, entries)))


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (OWN, [TraceRequest(40, 3, (7, 8, 9), 16)]),
        (TOKENS, [TraceRequest(18, 4, (0, 1), 16)]),
        (MESSAGES, [TraceRequest(20, 0, (0, 1), 16), TraceRequest(26, 2, (0, 2), 16)]),
    ],
)
def test_formats(entry: dict[str, Any], expected: list[TraceRequest], tmp_path: Path) -> None:
    assert read_lines(tmp_path, entry) == expected
    assert read_lines(tmp_path, entry, entry) == 2 * expected, "equal prompts have equal ids"


def test_a_log_of_vllm(tmp_path: Path) -> None:
    assert read(tmp_path, LOG) == 2 * [TraceRequest(3, 0, (0,), 16)]
    with pytest.raises(TraceError, match="no requests"):
        read(tmp_path, LOG.splitlines()[0])


def changed(entry: dict[str, Any], **values: object) -> dict[str, Any]:
    return {**entry, **values}


@pytest.mark.parametrize(
    ("first", "bad", "message"),
    [
        (OWN, changed(OWN, block_size=32), "block_size: 32, in the first entry 16"),
        (OWN, changed(OWN, block_size=0), "block_size: 0 is not in"),
        (OWN, changed(OWN, hash_ids=[1]), "hash_ids: 1 ids, input_length 40 needs 3"),
        (OWN, changed(OWN, input_length=0), "input_length: 0 is not in"),
        (
            OWN,
            {"input_length": 5, "text_input": "?"},
            "output_length: missing, needs an integer; the keys are input_length, ",
        ),
        (TOKENS, {}, "prompt_token_ids: missing, needs a list of integers in .*; the keys are none"),
        (TOKENS, {"prompt_token_ids": []}, "prompt_token_ids: 0 tokens"),
        (TOKENS, changed(TOKENS, output_tokens=-1), "output_tokens: -1 is not in"),
        (MESSAGES, {"messages": "hello"}, "messages: not a list"),
        (MESSAGES, {"messages": ["hello"]}, r"messages\[0\]: not a JSON object"),
        (MESSAGES, {"messages": [{"content": "x"}]}, r"messages\[0\].role: missing, needs a text"),
        (MESSAGES, {"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content: not a text"),
        (MESSAGES, {"conversation": []}, "messages: missing, needs a list; the keys are conversation"),
    ],
)
def test_errors_name_the_line_and_the_key(
    first: dict[str, Any], bad: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TraceError, match=f" line 2: {message}"):
        read_lines(tmp_path, first, bad)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 1: unknown format: the keys are question; a trace has JSON lines with "):
        read_lines(tmp_path, {"question": "?"})
    with pytest.raises(TraceError, match="line 1: not a JSON object; a trace has JSON lines with "):
        read(tmp_path, "[5]")
    with pytest.raises(TraceError, match="line 2: not JSON"):
        read(tmp_path, json.dumps(TOKENS) + "\nplain words")
