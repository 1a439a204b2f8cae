"""A trace from the journal of a server that serves: it leads to the hits that the server counted."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.client import Client, ReuseOrder, Session, connect
from kvpool.replay.sweep import sweep
from kvpool.replay.trace import read_trace
from kvpool.replay.trace_formats import TraceRequest
from support import processes
from support.command import kvpool
from support.logging_process import LoggingProcess
from support.server import ServerProcess, pool_config
from support.waiting import wait_until

BLOCK_SIZE = 4
NUM_BLOCKS = 60
PROMPTS = [[*range(10)], [*range(8), 50, 51, 52, 53], [9] * 9, [*range(10)], [*range(8), 50, 51, 52, 53, 54]]


class Served:
    """A server with a small journal, and a session that plays one request after another."""

    def __init__(self, folder: Path) -> None:
        self.journal = folder / "journal"
        journal = {"folder": str(self.journal), "max_bytes": 2**22}
        self.server = ServerProcess(f"unix:{folder}/s", journal=journal)
        self.client: Client = connect(f"unix:{folder}/s")
        self.client.create_pool(pool_config(num_blocks=NUM_BLOCKS))
        self.session: Session = self.client.open_session("m")
        self.num_played = 0

    def play(self, prompt: list[int], num_outputs: int = 0) -> None:
        request = self.session.request(f"r{self.num_played}", prompt)
        with self.session.step() as step:
            step.admit(request)
        for token in range(num_outputs):
            request.append((token,))
            self.session.allocate_slots(request, 1)
        self.session.mark_executed()
        self.session.free(request)
        self.num_played += 1

    def export(self, path: Path) -> list[TraceRequest]:
        done = kvpool("export-trace", self.journal, "--pool", "m", "--output", path)
        assert (done.returncode, done.stderr) == (0, "")
        return read_trace(path)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path)
    try:
        yield served
    finally:
        served.client.close()
        served.server.stop()


def test_a_trace_leads_to_the_hits_that_the_server_counted(served: Served, tmp_path: Path) -> None:
    for i, prompt in enumerate(PROMPTS):
        served.play(prompt, num_outputs=i)
    running = served.session.request("running", [7] * 5)
    served.session.allocate_slots(running, 5)
    trace = served.export(tmp_path / "trace.jsonl")
    assert [each.input_length for each in trace] == [10, 12, 9, 10, 13, 5]
    outputs = [each.output_length for each in trace]
    assert all(i - BLOCK_SIZE < known <= i for i, known in enumerate(outputs[:-1])), "up to the last report of credit"
    assert outputs[3:] == [3, 4, 0]
    ids = [each.hash_ids for each in trace]
    assert ids[0][:2] == ids[1][:2] == ids[3][:2] == ids[4][:2]
    assert ids[1] == ids[4][:3]
    assert len({ids[0][2], ids[3][2], ids[2][2]}) == 3, "partial blocks are not known to be equal"
    assert {each.id_tokens for each in trace} == {BLOCK_SIZE}
    stats = served.client.get_pool("m").prefix_cache
    curve = sweep(trace[:-1], BLOCK_SIZE, ReuseOrder.UNCACHED_FIRST)
    assert curve.hit_tokens_at(NUM_BLOCKS) == stats.hits_tokens == 28


def test_it_follows_a_server_from_log_to_log(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    program = LoggingProcess(
        processes.KVPOOL, "export-trace", str(served.journal), "--pool", "m", "--output", str(path), "--follow"
    )
    try:
        served.play([1, 2, 3, 4, 5])
        wait_until(lambda: path.exists() and path.read_text().count("\n") == 1)
        first = {each.name for each in served.journal.iterdir()}
        while {each.name for each in served.journal.iterdir()} & first - {"pools", "lock"}:
            served.play([served.num_played] * 200)
        wait_until(lambda: path.read_text().count("\n") == served.num_played)
        assert program.stop() == 0
    finally:
        program.kill()
    entries = list(map(json.loads, path.read_text().splitlines()))
    assert [each["hash_ids"][0] for each in entries[1:]] == [2 + 50 * i for i in range(len(entries) - 1)]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.is_dir, "there is no snapshot"),
        (lambda folder: (folder / "snapshot-1").write_bytes(b"x" * 20), "damaged head"),
        (lambda folder: (folder / "snapshot-1").write_bytes(b""), "no header"),
    ],
)
def test_files_that_are_no_journal_are_refused(damage: object, message: str, tmp_path: Path) -> None:
    assert callable(damage)
    damage(tmp_path)
    done = kvpool("export-trace", tmp_path, "--pool", "m")
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr


def test_it_changes_no_file(served: Served, tmp_path: Path) -> None:
    served.play([1, 2, 3, 4, 5])
    copy = tmp_path / "copy"
    shutil.copytree(served.journal, copy)
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    for _ in range(2):
        done = kvpool("export-trace", copy, "--pool", "m")
        assert json.loads(done.stdout)["hash_ids"] == [0, 1]
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before
    assert kvpool("export-trace", copy, "--pool", "other").stdout == ""
