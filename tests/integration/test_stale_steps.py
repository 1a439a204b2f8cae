"""A scheduler that is stopped, loses its lease and continues with its old tables: no block is used by two sessions.

Real processes: the server, a rank that runs steps in an engine, a `kvpool worker`, and the stopped scheduler.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvpool.client import Client, connect
from support.engine import PROMPT, Engine, Scheduler
from support.server import running_server
from support.waiting import wait_until
from support.workers import Workers

NEVER_SECONDS = 3600.0
BLOCK_SIZE = 16
REST_BLOCKS = (31, 31, 30)
"""With the seven blocks of the stopped scheduler, all blocks of the pool."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:  # a unix socket's path must be short
        yield Path(name)


def quarantined(client: Client) -> int:
    return client.get_pool("m").quarantined_blocks


def test_a_stopped_schedulers_step_never_uses_blocks_of_another_session(folder: Path, workers: Workers) -> None:
    with (
        running_server(dead_peer_seconds=3.0, quarantine_seconds=NEVER_SECONDS) as address,
        connect(address) as client,
    ):
        engine = Engine(address, 2, folder)
        scheduler = None
        try:
            workers.start(address, 1, 2)
            engine.wait_ready()
            engine.hold()
            scheduler = Scheduler(address, folder)
            old = [int(word) for word in scheduler.wait_for("blocks").split()[1:]]
            engine.wait_until_held()

            scheduler.pause()
            wait_until(lambda: quarantined(client) == len(old) == 7, "its lease expires while its step runs")
            with client.open_session("m", client_name="another") as session:
                rest = [session.request(f"rest {i}", [i] * BLOCK_SIZE * blocks) for i, blocks in enumerate(REST_BLOCKS)]
                assert all(session.admit(request) for request in rest)
                last = session.request("last", [7] * len(PROMPT))
                assert session.admit(last) is None, "none is left beside those of the stopped one"
                beats = engine.heartbeats()
                wait_until(lambda: engine.heartbeats() > beats + 1, "it sends heartbeats all the time")
                assert quarantined(client) == len(old), "the step runs still, on one of the ranks"

                engine.let_go()
                wait_until(lambda: quarantined(client) == 0, "the step is done: all ranks have answered")
                assert session.admit(last)
                new = last.block_ids[0]
                assert set(new) == set(old)
                assert engine.step(session.table_lease, new, 2) == "ran", "the scheduler is alive, and not fenced"
                scheduler.resume()
                scheduler.wait_for("step ran")
                scheduler.wait_for("step SESSION_ENDED")
                scheduler.wait_for("session LEASE_EXPIRED")
                assert engine.marks(new) == {2}, "nothing was written to them since"
        finally:
            for process in (engine, scheduler):
                if process:
                    process.kill()
