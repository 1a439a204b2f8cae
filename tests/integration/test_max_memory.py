"""A server with a maximum of memory refuses what needs more, and changes nothing; what it has stays served."""

from pathlib import Path

import pytest

from kvpool.client import ExhaustedError, NotFoundError, connect
from support.server import CommandLineServer, pool_config

LESS_THAN_ANY = 1


def test_changes_beyond_the_maximum_are_refused_and_a_journal_is_recovered(tmp_path: Path) -> None:
    address, journal = f"unix:{tmp_path}/s", ("--journal", tmp_path / "journal")
    with CommandLineServer(address, options=journal), connect(address) as client:
        client.create_pool(pool_config("m", 100))
        with client.open_session("m", lease_seconds=60) as session:
            assert session.admit(session.request("r", range(40)))
            session.mark_executed()
    options = (*journal, "--max-memory-bytes", LESS_THAN_ANY)
    with CommandLineServer(address, options=options), connect(address, deadline_seconds=0.5) as client:
        before = client.get_pool("m")
        assert before.cached_blocks == 10, "records of a journal are executed without the maximum"
        with pytest.raises(ExhaustedError) as refused:
            client.create_pool(pool_config("n", 100))
        assert refused.value.reason == "OUT_OF_MEMORY"
        with pytest.raises(ExhaustedError) as refused:
            client.open_session("m")
        assert refused.value.reason == "OUT_OF_MEMORY"
        with pytest.raises(NotFoundError):
            client.get_pool("n")
        assert client.get_pool("m") == before
