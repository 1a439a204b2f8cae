"""JSON logs of servers and workers, compared with the events that docs/reference/logs.md lists."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.client import KvpoolError, NotFoundError, connect
from support import processes
from support.logging_process import LoggingProcess
from support.logs import logged_events
from support.ranks import registration
from support.server import CommandLineServer, pool_config
from support.wire_ranks import WireRank
from support.workers import Workers, ready

JSON = ("--log-format", "json")
TIMING = ("--heartbeat-seconds", "0.2", "--rank-grace-seconds", "60")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
Entry = dict[str, Any]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/s"


@pytest.fixture
def server(request: pytest.FixtureRequest, address: str) -> Iterator[CommandLineServer]:
    """A server. Its parameter is the time after which a rank is silent: by default longer than a machine is busy."""
    timing = (*TIMING, "--heartbeat-timeout-seconds", getattr(request, "param", "60"))
    with CommandLineServer(address, options=(*JSON, *timing)) as server:
        yield server


def entries(process: LoggingProcess) -> list[Entry]:
    """All lines, checked against the table of events."""
    events = logged_events()
    found = []
    for line in process.lines:
        entry: Entry = json.loads(line)
        found.append(dict(entry))
        assert TIME.fullmatch(entry.pop("time")), line
        event = events[entry.pop("logger"), entry.pop("message")]
        level = entry.pop("level").lower()
        assert not event.levels or level in event.levels, line
        entry.pop("exception", None)
        assert set(entry) <= event.fields, line
    return found


def named(process: LoggingProcess, message: str) -> list[Entry]:
    """The fields of all entries with this message."""
    common = ("time", "level", "logger", "message")
    return [
        {name: value for name, value in entry.items() if name not in common}
        for entry in entries(process)
        if entry["message"] == message
    ]


def test_sessions_are_logged_and_refusals_do_not_flood(server: CommandLineServer, address: str) -> None:
    with connect(address) as client:
        client.create_pool(pool_config())
        client.create_pool(pool_config())
        with client.open_session("m", client_name='a "b"\nc') as session:
            session.admit(session.request("r", list(range(10))))
        for _ in range(200):
            with pytest.raises(NotFoundError):
                client.open_session("unknown")
        client.open_session("m", client_name="forgetful", lease_seconds=1.0)
    server.wait_for('"lease expired"')
    assert server.stop() == 0
    assert [entry["message"] for entry in entries(server)] == [
        *("server listening", "pool created", "session opened", "session closed", "session opened", "lease expired"),
        *("drain started", "drain ended", "server stopped"),
    ]
    who = {"pool": "m", "session": 1, "client": 'a "b"\nc', "epoch": 1}
    assert named(server, "session opened")[0] == {**who, "seconds": 60.0}
    assert named(server, "session closed") == [{**who, "requests": 1}]
    (expired,) = named(server, "lease expired")
    assert expired == {"pool": "m", "session": 2, "client": "forgetful", "epoch": 1, "requests": 0}


@pytest.mark.slow  # a rank is silent
@pytest.mark.parametrize("server", ["5"], indirect=True)
def test_a_silent_returned_and_lost_rank_is_logged(server: CommandLineServer, address: str) -> None:
    rank = WireRank(address).register(registration(world_size=1)).allocate()
    rank.wait_for("ready")
    server.wait_for('"pool degraded"')
    rank.beat()
    server.wait_for('"pool resumed"')
    rank.cut()
    server.wait_for('"pool degraded"', 2)
    assert [entry["message"] for entry in entries(server)] == [
        *("server listening", "rank registered", "rank allocated", "pool ready"),
        *("rank silent", "pool degraded", "rank back", "pool resumed", "rank lost", "pool degraded"),
    ]
    who = {"pool": "m", "rank": 0}
    assert [named(server, name) for name in ("rank silent", "rank back", "rank lost")] == [[who], [who], [who]]
    assert named(server, "pool degraded") == 2 * [{"pool": "m", "epoch": 1, "absent_ranks": [0]}]
    assert named(server, "pool resumed") == [{"pool": "m", "epoch": 1}]


def test_killed_and_terminated_ranks_are_logged(server: CommandLineServer, address: str, workers: Workers) -> None:
    first, second = workers.form(address, 2, *JSON)
    first_who, second_who = {"pool": "m", "rank": 0}, {"pool": "m", "rank": 1}

    second.signal(signal.SIGKILL)
    server.wait_for('"rank lost"')
    second = workers.start(address, 1, 2, *JSON)
    second.wait_for(ready(2))
    first.wait_for(ready(2))
    server.wait_for('"pool ready"', 2)
    assert named(server, "rank lost") == [second_who]
    assert named(server, "epoch passed") == [{"pool": "m", "epoch": 1, "sessions": 0}]
    assert named(server, "pool degraded") == [{"pool": "m", "epoch": 1, "absent_ranks": [1]}]
    assert [entry["epoch"] for entry in named(server, "pool ready")] == [1, 2]

    assert first.stop() == 0
    server.wait_for('"rank left"')
    server.wait_for('"epoch passed"', 2)
    assert named(server, "rank left") == [first_who]
    assert len(named(server, "rank lost")) == 1, "to say goodbye is not to be lost"
    assert named(first, "rank left") == [first_who]

    (allocated, *_) = [entry for entry in named(server, "rank allocated") if entry["rank"] == 0]
    readies = named(first, "rank ready")
    assert [entry["epoch"] for entry in readies] == [1, 2]
    assert readies[0] == {**allocated, "device": "cpu"}, "a number of bytes, of the same name on either side"
    registered = [entry for entry in named(server, "rank registered") if entry["rank"] == 0]
    assert [entry["pid"] for entry in registered] == [first.pid]

    assert server.stop() == 0
    second.wait_for('"stream ended, joining again".*DRAINING')
    assert second.stop() == 0
    assert entries(second)[-1]["message"] == "rank left"


def test_the_error_that_ends_a_command_is_json_too(server: CommandLineServer, address: str, workers: Workers) -> None:
    (first,) = workers.form(address, 1, *JSON)
    second = workers.start(address, 0, 1, *JSON)
    assert second.end() == 1
    (failed,) = named(second, "command failed")
    assert failed["error"].startswith("RANK_TAKEN: register.rank: rank 0 of pool 'm' is process")
    other = CommandLineServer(address, options=JSON, waits=False)
    assert other.end() == 1
    assert named(other, "command failed") == [{"error": f"another server listens on {address}"}]
    assert not named(server, "rank rejected")
    assert first.stop() == 0


def test_a_bug_is_one_object_with_its_traceback(address: str) -> None:
    program = (
        "from kvpool.server.services.pools import Pools; Pools.describe = None; from kvpool.cli import main; main()"
    )
    server = CommandLineServer(address, options=JSON, command=(processes.PYTHON, "-c", program))
    with connect(address) as client, pytest.raises(KvpoolError, match="see the server's log"):
        client.get_pool("m")
    assert server.stop() == 0
    (bug,) = named(server, "bug")
    assert bug["method"] == "kvpool.v1.AllocatorService/GetPool"
    assert bug["exception"].startswith("Traceback (most recent call last):\n")
    assert "TypeError: 'NoneType' object is not callable" in bug["exception"]


def test_the_console_has_one_line_per_event(address: str) -> None:
    server = CommandLineServer(address)
    with connect(address) as client:
        client.create_pool(pool_config())
        client.open_session("m", client_name="two words").close()
    assert server.stop() == 0
    logged = [re.sub(r"^[-0-9]{10} [:0-9]{8},\d{3} ", "", line.rstrip()) for line in server.lines]
    assert logged[:5] == [
        f"INFO kvpool.server: server listening addresses={address} steps={address}.steps journal=none",
        f"kvpool: listening on {address}",
        "INFO kvpool.server: pool created pool=m epoch=1 blocks=100",
        'INFO kvpool.server: session opened pool=m session=1 client="two words" epoch=1 seconds=60.0',
        'INFO kvpool.server: session closed pool=m session=1 client="two words" epoch=1 requests=0',
    ]


@pytest.mark.parametrize(("seconds", "is_behind"), [(1.7e9, True), (1.9e9, False)])
def test_a_clock_before_the_release_is_logged(seconds: float, *, is_behind: bool) -> None:
    """Epochs follow the clock where no journal knows the last one. A server that cannot bind ends at once."""
    program = f"import time; time.time = lambda: {seconds}; from kvpool.cli import main; main()"
    command = [sys.executable, "-c", program, "serve", "--listen", "unix:/none/s", "--log-format", "json"]
    environment = {name: value for name, value in os.environ.items() if name != "KVPOOL_SERVE_PAST_EPOCH"}
    errors = processes.run(command, env=environment, capture_output=True, text=True, check=False).stderr
    assert ("clock is behind, epochs may repeat" in errors) is is_behind
