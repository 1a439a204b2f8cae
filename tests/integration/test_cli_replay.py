"""`kvpool replay`: its servers, its sweep, and pools that exist."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvpool.client import connect
from support.command import Done, kvpool
from support.server import pool_config, running_server


def run(*arguments: object) -> Done:
    return kvpool("replay", *arguments)


def result_of(*arguments: object) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}))
    return path


def test_it_plays_on_the_server_of_the_environment(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = (trace, "--num-blocks", 300, "--block-size", 16)
    with running_server() as address, connect(address) as client:
        monkeypatch.setenv("KVPOOL_ADDRESS", address)
        done = run(*options)
        assert (done.returncode, done.stderr) == (0, "")
        assert client.get_pool("replay").prefix_cache.requests == 1
        monkeypatch.setenv("KVPOOL_REPLAY_ADDRESS", "nowhere")
        assert "address 'nowhere': " in run(*options).stderr


def test_a_repeated_trace_is_the_same(trace: Path) -> None:
    twice = result_of(trace, "--repeat", 2, "--num-blocks", 100, "--block-size", 512)
    assert (twice["requests"], twice["hit_tokens"]) == (2, 512)


def test_a_sweep_answers_what_replays_answer(tmp_path: Path) -> None:
    trace, plot = tmp_path / "trace.jsonl", tmp_path / "sweep.svg"
    prompts = [(1, 2, 3, 4), (5, 6), (1, 2, 3, 4), (1, 2, 7), (5, 6, 8)]
    trace.write_text(
        "\n".join(
            json.dumps({"timestamp": 0, "input_length": 512 * len(ids) - 12, "output_length": 9, "hash_ids": ids})
            for ids in prompts
        )
    )
    answer = result_of(trace, "--sweep", "--block-size", 256, "--num-blocks", 11, "--plot", plot, "--limit", 4)
    assert {key: answer[key] for key in ("requests", "input_tokens", "block_size", "reuse_order", "min_blocks")} == {
        "requests": 4,
        "input_tokens": 13 * 512 - 48,
        "block_size": 256,
        "reuse_order": "lru",
        "min_blocks": 9,
    }
    assert {9, 11, 22, 44, answer["max_blocks"]} <= {size["num_blocks"] for size in answer["sizes"]}
    for size in answer["sizes"][:2]:
        single = result_of(trace, "--block-size", 256, "--num-blocks", size["num_blocks"], "--limit", 4)
        assert (size["hit_tokens"], size["hit_rate"]) == (single["hit_tokens"], single["hit_rate"])
    assert plot.read_text().count("<polyline ") == 1
    table = run(trace, "--sweep", "--block-size", 256, "--num-blocks", 11).stdout
    assert re.search(r"^x 1 +11 +2,560 +[\d,]+ +[\d.]+% +[\d.]+%$", table, re.MULTILINE)


def test_host_memory_keeps_what_the_first_tier_evicts(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    prompts = [{"input_length": 2000, "output_length": 9, "hash_ids": list(range(i, i + 4))} for i in range(0, 16, 4)]
    trace.write_text("\n".join(json.dumps({"timestamp": 0, **each}) for each in prompts * 5))
    options, host = (trace, "--block-size", 256, "--num-blocks", 20), ("--num-host-blocks", 40)
    without, with_host = result_of(*options), result_of(*options, *host)
    added = {"host_hit_tokens", "copied_out_blocks", "copied_in_blocks", "lost_blocks"}
    assert with_host.keys() - without.keys() == added
    assert without["hit_tokens"] == 0
    assert with_host["hit_tokens"] == with_host["host_hit_tokens"] > 10 * 1792
    assert with_host["copied_in_blocks"] * 256 == with_host["host_hit_tokens"]
    facts = run(*options, *host).stdout
    assert re.search(rf"hit tokens in host memory +│ +{with_host['host_hit_tokens']:,} ", facts, re.MULTILINE)
    assert "host" not in run(*options).stdout

    sweep = (*options, "--sweep", "--sweep-host", 40, "--sweep-host", 5)
    answer = result_of(*sweep)
    assert [size["num_blocks"] for size in answer["sizes"]] == [10, 20, 40, 80]
    cells = {size["num_blocks"]: {each["num_host_blocks"]: each for each in size["host"]} for size in answer["sizes"]}
    assert (cells[20][40]["hit_tokens"], cells[20][40]["hit_rate"]) == (with_host["hit_tokens"], with_host["hit_rate"])
    assert list(cells[20]) == [40, 5]
    assert cells[80][5]["hit_tokens"] == answer["sizes"][-1]["hit_tokens"]
    table = run(*sweep).stdout.splitlines()
    assert re.search(r"of all hits +\+ 40 host +\+ 5 host *$", table[0])
    assert re.search(rf"^x 1 .* 0.00% .* {with_host['hit_rate']:.2%} +[\d.]+% *$", table[2])
    assert "host" not in str(result_of(*options, "--sweep"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--block-size", 16, "--sweep", "--num-blocks", 99, "--num-host-blocks", 9),
            "--num-host-blocks is --sweep-host",
        ),
        (("--address", "nowhere:1", "--num-host-blocks", 9), "--num-host-blocks needs --num-blocks"),
        (("--block-size", 16, "--num-blocks", 99, "--sweep-host", 9), "--sweep-host needs --sweep"),
        (("--sweep",), "--sweep needs --block-size"),
        (("--block-size", 16, "--num-blocks", 99, "--plot", "x.svg"), "--plot draws the curve of --sweep"),
        (("--block-size", 16, "--sweep", "--plot", "/nowhere/x.svg"), "No such file"),
        (("--num-blocks", 10), "both --num-blocks and --block-size"),
        ((), "without --address"),
        (("--address", "nowhere"), "needs host:port or unix:/path"),
    ],
)
def test_contradicting_options_are_refused_on_one_line(options: tuple[object, ...], message: str, trace: Path) -> None:
    done = run(trace, *options)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert message in " ".join(done.stderr.split())


def test_an_existing_pool_is_used_unchanged(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    entries = [
        {"timestamp": 0, "input_length": length, "output_length": 9, "hash_ids": list(range(-(-length // 512)))}
        for length in (600, 1023, 1025)
    ]
    trace.write_text("\n".join(map(json.dumps, entries)))
    with running_server() as address, connect(address) as client:
        client.create_pool(pool_config(num_blocks=400))  # 4 tokens per block, at most 1,024 per request
        result = result_of(trace, "--address", address, "--pool", "m")
        assert (result["requests"], result["rejected_requests"]) == (2, 1)
        assert client.get_pool("m").config.num_blocks == 400
        info = client.get_pool("m")
        assert (info.sessions, info.requests, info.free_blocks) == (0, 0, 399)


def test_a_pool_that_does_not_exist_is_named(trace: Path) -> None:
    with running_server() as address:
        done = run(trace, "--address", address, "--pool", "m")
    assert (done.returncode, "no pool 'm'" in done.stderr) == (1, True), done.stderr
