"""Servers that kill themselves at an armed fault point, or meet a bug there."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvpool.client import AbortedError, aio, connect
from kvpool.core.execution import allocate_batch
from kvpool.server.app import Server
from kvpool.server.config import ServerConfig
from kvpool.server.crash import EXIT_STATUS
from kvpool.wire.errors import ServerError
from support.server import CommandLineServer, pool_config
from support.waiting import DEADLINE_SECONDS


def test_an_unknown_fault_point_is_refused_at_start() -> None:
    server = CommandLineServer("127.0.0.1:0", faults="step.aplied:kill:1", waits=False)
    assert server.end() == 1
    assert "'step.aplied' is not a fault point" in server.log


def test_a_server_with_a_bug_ends_and_the_next_one_has_the_state_before(tmp_path: Path) -> None:
    """The client's step is sent again to the next server, which applies it once."""
    address, options = f"unix:{tmp_path / 's'}", ("--journal", tmp_path / "journal")
    broken = CommandLineServer(address, options=options, faults="journal.before_write:bug:5")
    with connect(address, deadline_seconds=DEADLINE_SECONDS) as client:
        client.create_pool(pool_config())
        session, other = client.open_session("m"), client.open_session("m")
        request = session.request("r", range(20))
        with ThreadPoolExecutor(1) as executor:
            admission = executor.submit(session.admit, request)
            assert broken.end() == EXIT_STATUS
            assert "bug: a change failed halfway, the server exits" in broken.log
            with CommandLineServer(address, options=options):
                assert admission.result(timeout=DEADLINE_SECONDS)
                assert request.block_ids == [[1, 2, 3, 4, 5]]
                assert client.get_pool("m").epoch == session.epoch
                hits = [other.get_computed_blocks(other.request(f"r{i}", range(20))).num_tokens for i in range(2)]
                assert hits == [0, 0], "nothing is executed"
                session.mark_executed()
                assert other.get_computed_blocks(other.request("r2", range(20))).num_tokens == 16


async def test_a_server_without_a_journal_ends_the_epoch_of_the_pool_with_a_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a step is applied; without a new epoch, the other session would hit blocks with other contents."""
    allocate, bugs = allocate_batch.allocate_plain_rows, iter([True])

    def fail_once(*arguments: Any) -> Any:
        result = allocate(*arguments)
        if next(bugs, False):
            raise ZeroDivisionError
        return result

    server = Server(ServerConfig(addresses=(f"unix:{tmp_path / 's'}",)))
    (address,) = await server.start()
    async with aio.connect(address) as client:
        for name in ("m", "untouched"):
            await client.create_pool(pool_config(name))
        session, other, kept = [await client.open_session(name) for name in ("m", "m", "untouched")]
        request = session.request("r", range(4))
        assert await session.admit(request)
        request.append(range(100, 108))
        monkeypatch.setattr("kvpool.core.execution.apply.allocate_plain_rows", fail_once)
        with pytest.raises(ServerError):
            await session.allocate_slots(request, 8)
        for again in (session.settle(), other.admit(other.request("r2", range(8)))):
            with pytest.raises(AbortedError, match="open a new session"):
                await again
        later = await client.open_session("m")
        assert later.epoch == session.epoch + 1
        found = await later.get_computed_blocks(later.request("r", [*range(4), *range(100, 108)]))
        assert found.num_tokens == 0
        assert await kept.admit(kept.request("r", range(8)))
    await server.stop()
