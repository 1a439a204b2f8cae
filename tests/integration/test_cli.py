"""The commands serve, replay and demo, with real processes, sockets and signals."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.client import connect
from support import processes
from support.command import Done, kvpool
from support.paths import ROOT
from support.server import CommandLineServer, pool_config

TRACES = Path(os.environ.get("KVPOOL_TRACES", ROOT.parent / "shared" / "traces"))


def last_json(done: Done) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty requests with four prefixes, of two to five blocks of 512 tokens."""
    path = tmp_path / "trace.jsonl"
    lines = []
    for i in range(40):
        hash_ids = [i % 4, *(1000 + (i % 8) * 10 + j for j in range(i % 4)), 5000 + i]
        length = 512 * (len(hash_ids) - 1) + 100 + i
        lines.append({"timestamp": i, "input_length": length, "output_length": 20, "hash_ids": hash_ids})
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def expected_hit_tokens(trace: Path) -> int:
    """Returns the hits of an unlimited cache with blocks of 512 tokens."""
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for entry in map(json.loads, trace.read_text().splitlines()):
        full = entry["hash_ids"][: entry["input_length"] // 512]
        prefixes = [tuple(full[: i + 1]) for i in range(len(full))]
        hits += 512 * sum(prefix in seen for prefix in prefixes)
        seen.update(prefixes)
    return hits


@pytest.fixture
def server(tmp_path: Path) -> Iterator[CommandLineServer]:
    with CommandLineServer(f"unix:{tmp_path / 's'}", "127.0.0.1:0") as server:
        yield server


def test_serve_listens_on_all_addresses_and_stops_on_sigterm(server: CommandLineServer) -> None:
    for address in server.addresses:
        with connect(address) as client, pytest.raises(Exception, match="no pool"):
            client.get_pool("x")
    server.stop_cleanly()


def test_a_pools_first_epoch_is_above_those_of_earlier_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPOOL_SERVE_PAST_EPOCH")
    epochs = []
    for arguments in ((), ("--past-epoch", "41")):
        with (
            CommandLineServer(f"unix:{tmp_path / 's'}", options=arguments) as server,
            connect(server.addresses[0]) as client,
        ):
            epochs.append(client.create_pool(pool_config()).epoch)
    assert epochs[0] > 50_000_000, "seconds since 2025 began"
    assert epochs[1] == 42


def test_flags_override_environment_and_environment_overrides_file(tmp_path: Path) -> None:
    config = tmp_path / "kvpool.toml"
    config.write_text(f'listen = ["unix:{tmp_path}/file"]\nmax_message_bytes = 1\ngrace_seconds = 0.5\n')
    refused = kvpool("serve", "--config", config)
    assert (refused.returncode, "max_message_bytes: 1 is not in" in refused.stderr) == (2, True)
    environment = {"KVPOOL_SERVE_MAX_MESSAGE_BYTES": "2"}
    refused = kvpool("serve", "--config", config, **environment)
    assert (refused.returncode, "KVPOOL_SERVE_MAX_MESSAGE_BYTES: 2 is not in" in refused.stderr) == (2, True)
    options = ("--config", config, "--max-message-bytes", "70000")
    with CommandLineServer(options=options, environment=environment) as server:
        assert server.addresses == [f"unix:{tmp_path}/file"]


def test_serve_reports_an_address_in_use(server: CommandLineServer) -> None:
    for address in server.addresses:
        done = kvpool("serve", "--listen", address)
        assert (done.returncode, address in done.stderr) == (1, True)
        assert re.search(r": Address already in use|another server listens on", done.stderr)


def test_replay_hits_equal_a_plain_count(trace: Path) -> None:
    arguments = ("replay", str(trace), "--num-blocks", "1000", "--block-size", "512", "--json")
    result = last_json(kvpool(*arguments))
    assert (result["requests"], result["evicted_blocks"]) == (40, 0)
    assert result["hit_tokens"] == expected_hit_tokens(trace) > 0
    assert result["hit_rate"] == result["hit_tokens"] / result["input_tokens"]


def test_replay_against_a_running_server(trace: Path, server: CommandLineServer) -> None:
    address = server.addresses[1]
    arguments = ("replay", str(trace), "--num-blocks", "60", "--block-size", "128", "--address", address)
    result = last_json(kvpool(*arguments, "--json"))
    assert (result["requests"], result["output_tokens"]) == (40, 0)
    with connect(address) as client:
        assert client.get_pool("replay").free_blocks == 59
    assert "hit rate" in kvpool(*arguments).stdout
    differing = kvpool(*arguments, "--num-blocks", "61")
    assert (differing.returncode, "POOL_DIFFERS" in differing.stderr) == (1, True)


def test_a_bad_trace_plays_nothing(trace: Path, server: CommandLineServer) -> None:
    trace.write_text(trace.read_text().replace('"input_length": 1651', '"input_length": "x"', 1) + "\n{")
    address = server.addresses[0]
    done = kvpool("replay", trace, "--num-blocks", 60, "--block-size", 512, "--address", address)
    assert (done.returncode, " line " in done.stderr) == (2, True)
    with connect(address) as client, pytest.raises(Exception, match="no pool"):
        client.get_pool("replay")


@pytest.mark.slow
def test_demo_prints_its_table() -> None:
    done = processes.run([processes.KVPOOL, "demo"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    for row in ("requests", "evictions", "preemptions", "steps per second"):
        assert row in done.stdout
    for figure in ("59.17%", "306,576 tokens (27.9% of all prompts)"):
        assert figure in done.stdout, "it does not depend on the load of the machine"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_blocks", "hit_rate", "hit_tokens"),
    [
        ("conversation", 250_000, 0.3734, 54_063_104),
        pytest.param("conversation", 5860, 0.1386, 20_067_328, marks=pytest.mark.complete),
        pytest.param("synthetic", 250_000, 0.6504, 39_802_880, marks=pytest.mark.complete),
        ("synthetic", 5860, 0.3148, 19_262_464),
    ],
)
def test_real_traces_give_the_references_hit_rates(
    name: str, num_blocks: int, hit_rate: float, hit_tokens: int
) -> None:
    path = TRACES / f"mooncake_{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"no trace at {path}; KVPOOL_TRACES names another folder")
    result = last_json(kvpool("replay", path, "--num-blocks", num_blocks, "--block-size", 512, "--json"))
    assert (round(result["hit_rate"], 4), result["hit_tokens"]) == (hit_rate, hit_tokens)
