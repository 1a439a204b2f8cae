"""`kvpool replay` of generated chats, on existing pools, and with --forever."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.client import Client, connect
from support import processes
from support.command import Done, kvpool
from support.logging_process import LoggingProcess
from support.server import ServerProcess, pool_config, running_server
from support.workers import worker_processes


def run(*arguments: object) -> Done:
    return kvpool("replay", *arguments)


def result_of(*arguments: object) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture
def endless() -> Iterator[list[LoggingProcess]]:
    """Schedulers with --forever; killed after the test if they still run."""
    started: list[LoggingProcess] = []
    yield started
    for program in started:
        program.kill()
        assert "Traceback" not in program.log


def play_forever(*arguments: object) -> LoggingProcess:
    return LoggingProcess(
        processes.KVPOOL, "replay", "--forever", "--chats", "3", "--deadline-seconds", "3", *map(str, arguments)
    )


def assert_idle(client: Client, pool: str) -> None:
    info = client.get_pool(pool)
    assert (info.sessions, info.requests, info.free_blocks) == (0, 0, info.config.num_blocks - 1)


def test_it_plays_on_the_server_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--chats", 1, "--num-blocks", 300, "--block-size", 16)
    with running_server() as address, connect(address) as client:
        monkeypatch.setenv("KVPOOL_ADDRESS", address)
        done = run(*options)
        assert (done.returncode, done.stderr) == (0, f"kvpool: playing on {address}\n")
        assert client.get_pool("replay").prefix_cache.requests == 5
        monkeypatch.setenv("KVPOOL_REPLAY_ADDRESS", "unix:/nowhere/s")
        assert "unix:/nowhere/s: " in run(*options, "--deadline-seconds", "0.2").stderr


@pytest.mark.slow
def test_chats_are_reproducible_and_hit_shared_prompts() -> None:
    options = ("--chats", 3, "--num-blocks", 3000, "--block-size", 16)
    first, again = result_of(*options), result_of(*options)
    assert (first["requests"], first["sessions"], first["rejected_requests"]) == (15, 1, 0)
    assert first["hit_tokens"] == again["hit_tokens"] > 0
    assert result_of(*options, "--seed", 7)["input_tokens"] != first["input_tokens"]
    assert result_of(*options, "--share", 1)["input_tokens"] != first["input_tokens"]


@pytest.mark.slow
def test_repeated_chats_are_new_conversations_and_a_repeated_trace_is_the_same(tmp_path: Path) -> None:
    chats = result_of("--chats", 2, "--repeat", 3, "--sessions", 2, "--num-blocks", 5000, "--block-size", 16)
    assert (chats["requests"], chats["failed_sessions"]) == (2 * 2 * 5 * 3, 0)
    assert chats["hit_tokens"] < chats["input_tokens"] * 0.95
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}))
    for sessions in ((), ("--sessions", 1)):
        twice = result_of(trace, "--repeat", 2, "--num-blocks", 100, "--block-size", 512, *sessions)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--chats", 1, "--block-size", 16, "--sweep"), "give TRACE"),
        (("TRACE", "--sweep"), "give TRACE and --block-size"),
        (("TRACE", "--block-size", 16, "--sweep", "--sessions", 2), "neither --sessions nor"),
        (("TRACE", "--block-size", 16, "--num-blocks", 99, "--plot", "x.svg"), "--plot draws the curve of --sweep"),
        (("TRACE", "--block-size", 16, "--sweep", "--plot", "/nowhere/x.svg"), "No such file"),
    ],
)
def test_options_that_a_sweep_refuses(options: tuple[object, ...], message: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}))
    done = run(*(trace if option == "TRACE" else option for option in options))
    assert done.returncode != 0
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
        for sessions, played in (
            ((), 2),
            (("--sessions", 1), 1),
        ):  # with its output, the second request is too long as well
            result = result_of(trace, "--address", address, "--pool", "m", *sessions)
            assert (result["requests"], result["rejected_requests"]) == (played, 3 - played)
        assert client.get_pool("m").config.num_blocks == 400
        assert_idle(client, "m")


def test_replay_waits_for_a_missing_pool(endless: list[LoggingProcess]) -> None:
    with running_server() as address, connect(address) as client:
        done = run("--chats", 1, "--address", address, "--pool", "m", "--wait-seconds", 0.2)
        assert (done.returncode, "NOT_FOUND" in done.stderr or "NO_POOL" in done.stderr) == (1, True), done.stderr
        endless.append(play_forever("--address", address, "--pool", "m", "--wait-seconds", 0.2))
        endless[0].wait_for("a new session in")
        client.create_pool(pool_config(num_blocks=400))
        endless[0].wait_for("a session on pool 'm', epoch 1")
        assert endless[0].stop() == 0
        assert_idle(client, "m")


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_forever_continues_after_a_restart_of_the_server(
    how: signal.Signals, tmp_path: Path, endless: list[LoggingProcess]
) -> None:
    address = f"unix:{tmp_path}/s"
    server = ServerProcess(address, grace_seconds=1.0)
    endless.append(play_forever("--address", address, "--num-blocks", 500, "--block-size", 16))
    endless[0].wait_for("a session on pool 'replay'")
    server.signal(how)
    server.end()
    endless[0].wait_for("a new session in")
    with ServerProcess(address):
        endless[0].wait_for("a session on pool 'replay'", count=2)
        assert endless[0].stop() == 0
        with connect(address) as client:
            assert_idle(client, "replay")


@pytest.mark.slow
def test_forever_continues_after_the_end_of_an_epoch(tmp_path: Path, endless: list[LoggingProcess]) -> None:
    with running_server() as address, connect(address) as client, worker_processes(tmp_path) as workers:
        options = ("--max-model-len", "4096")  # enough for a whole conversation
        ranks = [workers.start(address, rank, 2, *options, blocks=400) for rank in range(2)]
        endless.append(play_forever("--address", address, "--pool", "m"))
        endless[0].wait_for("a session on pool 'm', epoch 1")
        assert ranks[1].stop() == 0
        workers.start(address, 1, 2, *options, blocks=400)
        endless[0].wait_for("EPOCH_PASSED|RANK_LOST")
        endless[0].wait_for("a session on pool 'm', epoch 2")
        assert endless[0].stop() == 0
        assert_idle(client, "m")


def test_a_pool_that_is_too_small_for_all_requests_is_reported(endless: list[LoggingProcess]) -> None:
    with running_server() as address:
        endless.append(play_forever("--address", address, "--num-blocks", 3, "--block-size", 16))
        assert endless[0].end() == 1
        endless[0].wait_for("too small for every request")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either TRACE or --chats"),
        (("trace.jsonl", "--chats", 1), "give either TRACE or --chats"),
        (("--chats", 1, "--num-blocks", 10), "both --num-blocks and --block-size"),
        (("--chats", 1), "without --address"),
        (("--chats", 1, "--forever", "--num-blocks", 10, "--block-size", 16), "without --address"),
        (("--chats", 1, "--forever", "--address", "unix:/x", "--sessions", 2), "--forever runs one scheduler"),
        (("--chats", 1, "--address", "nowhere"), "needs host:port or unix:/path"),
    ],
)
def test_contradicting_options_are_refused_on_one_line(arguments: tuple[object, ...], message: str) -> None:
    done = run(*arguments)
    assert (done.returncode, message in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr
