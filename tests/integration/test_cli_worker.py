"""`kvpool worker` as a person runs it: settings in, a rank or one clear sentence out."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.client import connect
from kvpool.v1.pool_pb2 import PoolState
from support.command import kvpool
from support.paths import MODEL_CONFIGS
from support.server import running_server
from support.waiting import DEADLINE_SECONDS
from support.workers import BLOCK_BYTES, LAYER, Workers


@pytest.fixture
def server() -> Iterator[str]:
    with running_server() as address:
        yield address


@pytest.fixture
def arguments(tmp_path: Path) -> list[object]:
    """What a rank of a small model is started with, its memory apart."""
    path = tmp_path / "layers-of-four.json"
    window = LAYER | {"type": "SlidingWindowSpec", "sliding_window": 64}
    path.write_text(json.dumps({"layers": {f"l.{i}": (LAYER, window)[i % 2] for i in range(4)}}))
    server = f"unix:{tmp_path}/no-server"
    model = ("--layers", path, "--max-model-len", 1024)
    return ["worker", "--server", server, "--pool", "m", "--rank", 0, "--device", "cpu", *model]


def test_ranks_form_a_pool_that_serves_and_leave_it(server: str, workers: Workers) -> None:
    ranks = workers.form(server, 2)
    size = f"{100 * BLOCK_BYTES / 2**10:.1f} KiB"
    for number, rank in enumerate(ranks):
        line = rank.wait_for("ready")
        assert line.endswith(f'rank ready pool=m rank={number} epoch=1 blocks=100 bytes="{size}" device=cpu\n')
    with connect(server) as client:
        info = client.get_pool("m")
        assert (info.state, info.epoch, info.config.num_blocks) == (PoolState.POOL_STATE_READY, 1, 100)
        assert [rank.pid for rank in info.ranks] == [rank.pid for rank in ranks]
        assert {(rank.device, rank.allocated_bytes) for rank in info.ranks} == {("cpu", 100 * BLOCK_BYTES)}
        session = client.open_session("m")
        assert session.allocate_slots(session.request("r", list(range(40))), 40)
        ranks[0].signal(signal.SIGINT)
        assert ranks[0].end() == 0
        assert ranks[0].lines[-1].endswith(" rank left pool=m rank=0\n")
        ranks[1].wait_for("epoch passed pool=m rank=1 epoch=1")
        assert client.get_pool("m").state == PoolState.POOL_STATE_DEGRADED
    for rank in ranks:
        assert sum("ready" in line for line in rank.lines) == 1, "said once"


def test_stages_of_a_pipeline_hold_their_own_layers(server: str, workers: Workers) -> None:
    flags = ("--tp", "1", "--pp", "2", "--num-blocks", "50")
    ranks = [workers.start(server, rank, 2, *flags) for rank in range(2)]
    for rank in ranks:
        rank.wait_for(f'rank ready .* blocks=50 bytes="{50 * BLOCK_BYTES / 2 / 2**10:.1f} KiB" device=cpu')


def test_ranks_that_differ_are_refused(server: str, workers: Workers) -> None:
    workers.start(server, 0, 2).wait_for("rank registered pool=m")
    differing = workers.start(server, 1, 2, "--no-caching")
    assert differing.end() == 1
    differing.wait_for("^Error: RANKS_DISAGREE: register.options.enable_caching: False, the other ranks have True$")


def test_a_model_that_does_not_fit_ends_all_ranks(server: str, workers: Workers) -> None:
    ranks = [workers.start(server, rank, 2, blocks=20) for rank in range(2)]
    for rank in ranks:
        assert rank.end() == 1
        rank.wait_for("^Error: ONE_REQUEST_DOES_NOT_FIT: ")


def test_flags_come_before_the_environment_before_the_file(
    server: str, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "worker.toml"
    config.write_text('pool = "x"\nnum_blocks = 70\nreserve = "4MiB"\nevents = true\nlayout = "triton"\n')
    monkeypatch.setenv("KVPOOL_WORKER_NUM_BLOCKS", "60")
    monkeypatch.setenv("KVPOOL_WORKER_POOL", "y")
    workers.start(server, 0, 1, "--config", str(config)).wait_for("rank ready .*blocks=60 ")
    with connect(server) as client:
        assert client.get_pool("m").config.enable_events
    monkeypatch.setenv("KVPOOL_WORKER_NUMBLOCKS", "60")
    refused = workers.start(server, 0, 1)
    assert refused.end() == 2
    refused.wait_for("unknown key KVPOOL_WORKER_NUMBLOCKS; did you mean KVPOOL_WORKER_NUM_BLOCKS")


def refused(*arguments: object) -> tuple[int, str]:
    """Runs the command; returns its exit status and the last line of stderr."""
    done = kvpool(*arguments)
    return done.returncode, done.stderr.splitlines()[-1]


def refused_by(program: str, *arguments: object) -> tuple[int, str]:
    """Runs a program that runs the command, in an interpreter that has imported nothing before."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--tp", 2, "--world-size", 3], 1, "--world-size: 3 is not --tp 2 times --pp 1, which is 2"),
        (["--tp", 2, "--rank", 2], 1, "--rank: 2 is not in [0, 1]"),
        (["--rank", -1], 1, "--rank: -1 is not in [0, 0]"),
        (["--memory", 0], 1, "--memory: 0 is not in [1,"),
        (["--memory", "900TiB"], 1, "LARGER_THAN_THE_DEVICE: --memory: 921,600.0 GiB are more than this machine's"),
        ([], 1, "--memory: must be given on cpu"),
        (["--memory", "1GiB", "--device", "cuda:99"], 1, "--device: 'cuda:99' does not exist; available: cpu"),
        (["--memory", "1GiB", "--device", "toaster"], 1, "--device: 'toaster' does not exist; available: cpu"),
        (["--memory", "1GiB", "--layout", "none"], 1, "--layout: layer 'l.0': 'none' is not known; known: flash_attn,"),
        (["--memory", "1GiB", "--layout", "mla"], 1, "--layout: 'mla' for layer 'l.0': a FullAttentionSpec keeps no"),
        (["--gpu-memory-utilization", "1.5"], 1, "--gpu-memory-utilization: 1.5 is not in (0, 1]"),
        (["--gpu-memory-utilization", "0.5", "--memory", "1B"], 2, "exclude each other"),
        (["--memory", "much"], 2, "is not a size such as 80GiB"),
        (["--host-memory", "1GiB"], 2, "--lend-token-file, --keep-memory and --host-memory need --lend"),
        (["--pool", "a b"], 1, "--pool: needs 1 to 128 letters"),
        (["--server", "nowhere"], 1, "--server: address 'nowhere': needs host:port or unix:/path"),
        (["--layers", "/missing/layers.json"], 2, "/missing/layers.json: No such file or directory"),
        (["--model", MODEL_CONFIGS / "llama-3.1-8b.json"], 2, "--layers cannot be combined"),
        (["--pp", 5], 1, "--pp: 5 is not in [1, 4]"),
        (["--metrics-listen", "9465"], 2, "--metrics-listen: address '9465': needs host:port"),
        (["--health-listen", "unix:h"], 2, "--health-listen: address 'unix:h': a unix socket needs an absolute path"),
        (["--max-model-len", "auto"], 2, "--layers needs --max-model-len with a number"),
    ],
)
def test_bad_input_is_refused_with_one_line(
    arguments: list[object], flags: list[object], status: int, words: str
) -> None:
    code, line = refused(*arguments, *flags)
    assert (code, words in line) == (status, True), line


def test_a_model_is_needed() -> None:
    code, line = refused("worker", "--pool", "m", "--rank", 0)
    assert (code, line) == (
        2,
        "Error: give --lend unix:PATH for the memory of engines, --model CONFIG.json, or --layers FILE",
    )


@pytest.mark.slow
def test_a_worker_with_another_protocol_version_is_refused(server: str, arguments: list[object]) -> None:
    program = (
        "from kvpool.wire import ranks; ranks.PROTOCOL_VERSION = 1;"
        " from kvpool.cli import main; main(prog_name='kvpool')"
    )
    code, line = refused_by(program, *arguments, "--memory", "8MiB", "--server", server)
    assert code == 1
    assert "PROTOCOL_VERSION: register.protocol_version: 1; this server uses 4" in line


def test_without_torch_the_error_names_the_package_to_install(arguments: list[object]) -> None:
    program = "import sys; sys.modules['torch'] = None; from kvpool.cli import main; main(prog_name='kvpool')"
    code, line = refused_by(program, *arguments, "--memory", "8MiB")
    assert (code, line) == (1, "Error: kvpool worker needs torch: install kvpool with its extra 'worker'")


def test_the_command_line_alone_imports_no_torch() -> None:
    program = (
        "import sys, kvpool.cli.worker, kvpool.cli.serve;"
        " sys.exit('torch is there' if 'torch' in sys.modules else 'it is not')"
    )
    assert refused_by(program) == (1, "it is not")
