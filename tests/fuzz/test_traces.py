"""A trace from anywhere is read, or refused with one line; within bounded memory."""

import gzip
import json
import sys
from pathlib import Path
from random import Random

import pytest

from kvpool.replay.trace import read_trace
from kvpool.replay.trace_formats import MAX_LINE_CHARACTERS, TraceError
from support import processes

MAX_BYTES = 2**30
PROGRAM = f"""
import resource, sys
from pathlib import Path
from kvpool.replay.trace import read_trace
from kvpool.replay.trace_formats import TraceError
resource.setrlimit(resource.RLIMIT_AS, ({MAX_BYTES}, {MAX_BYTES}))
try:
    requests = read_trace(Path(sys.argv[1]))
except TraceError as error:
    print(error)
else:
    print(max(len(request.token_ids()) for request in requests))
"""
SEEDS = (
    json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}),
    json.dumps({"input_length": 40, "output_length": 5, "hash_ids": [1, 2, 3], "block_size": 16}),
    json.dumps({"prompt_token_ids": [*range(20)], "output_tokens": 4}),
    json.dumps({"messages": [{"role": "user", "content": [{"text": "a"}]}, {"role": "assistant", "content": "b"}]}),
    "DEBUG Request x details: prompt: 'a', prompt_token_ids: [5, 6, 7], prompt_embeds shape: None.",
)
PIECES = (
    "[",
    "{",
    "}",
    '"',
    ",",
    "-1",
    "1e999",
    "NaN",
    "9" * 5000,
    "null",
    "[" * 5000,
    "\\ud800",
    "\x1b[2J",
    "\ufeff",
    "\n",
    " ",
)
TURNS = [{"role": "user"}] * 60_000
HOSTILE = {
    "a prompt of 2^31 tokens": b'{"timestamp":0,"input_length":%d,"output_length":0,"hash_ids":[1],"block_size":%d}'
    % (2**31 - 8, 2**31 - 8),
    "an id of 2^22 tokens": b'{"input_length":4194304,"output_length":0,"hash_ids":[1],"block_size":4194304}',
    "a deep line": b"[" * 10_000_000,
    "a line of 4 GiB": gzip.compress(b"x" * MAX_LINE_CHARACTERS) * 256,
    "an array of 4 GiB": gzip.compress(b"[" + b"{}," * (MAX_LINE_CHARACTERS // 3)) * 256,
    "many turns": json.dumps({"messages": TURNS}).encode(),
    "many beginnings of a log": b"Request a details: " * 100_000 + b"\n" + b"prompt_token_ids: [" * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_memory_is_bounded(case: str, tmp_path: Path) -> None:
    path = tmp_path / ("trace.gz" if "GiB" in case else "trace")
    path.write_bytes(HOSTILE[case])
    done = processes.run([sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1
    if case != "an id of 2^22 tokens":
        assert " line 1: " in done.stdout


def refusal(path: Path) -> str:
    try:
        read_trace(path)
    except TraceError as error:
        return str(error)
    return ""


def test_mutated_traces_are_read_or_refused_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    num_refused = 0
    for seed in range(2000):
        rng = Random(seed)
        text = "\n".join(rng.choices(SEEDS, k=2))
        for _ in range(rng.randint(1, 3)):
            at, length = rng.randrange(len(text) + 1), rng.choice((0, 0, 1, 5))
            text = text[:at] + rng.choice(PIECES) + text[at + length :]
        path.write_text(text, encoding="utf-8")
        error = refusal(path)
        num_refused += bool(error)
        assert len(error) < 1000, seed
        assert error.isprintable(), seed
    assert 0 < num_refused < 2000
