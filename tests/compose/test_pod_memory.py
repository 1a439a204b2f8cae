"""The limits that the chart computes from the memory of a container keep a greedy client from having it killed."""

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import grpc
import pytest

from kvpool.client import Client, KvpoolError, connect
from kvpool.v1 import allocator_pb2_grpc
from support.helm import render, variables
from support.server import CommandLineServer, free_port, pool_config
from support.waiting import wait_until

sys.path.insert(0, str(Path(__file__).parent))
from greedy import HASH_BYTES, GreedySession, greedy_pool, incomplete_calls, resident_mib, unread_watches

PREFIX_TOKENS: Final = 2**15
REMEMBERED_RESULTS: Final = 16
CGROUP: Final = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited_memory(num_bytes: int) -> Iterator[list[str]]:
    """Yields what to put before a command, so that the kernel kills it beyond this memory; nothing if only root may."""
    v1, v2 = CGROUP / "memory", CGROUP / "cgroup.subtree_control"
    parent, name = (v1, "memory.limit_in_bytes") if v1.is_dir() else (CGROUP, "memory.max")
    if not (v1.is_dir() or (v2.exists() and "memory" in v2.read_text())) or not os.access(parent, os.W_OK):
        yield []
        return
    group = parent / f"kvpool-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / name).write_text(str(num_bytes))
        yield ["sh", "-c", f'echo $$ >{group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "the server has ended")
        group.rmdir()


def until_refused(change: Callable[[], object], reason: str) -> int:
    """Repeats a change until it is refused for this reason. Returns how often it was made."""
    for count in itertools.count():
        try:
            change()
        except KvpoolError as error:
            assert error.reason == reason, error
            return count
    raise AssertionError


def modest_client_works(client: Client) -> bool:
    """Whether a new session of another pool gets blocks."""
    try:
        with client.open_session("modest") as session:
            return session.admit(session.request("r", range(40))) is not None
    except KvpoolError:
        return False


@pytest.mark.parametrize("memory_mib", [2048, pytest.param(4096, marks=pytest.mark.slow)])
def test_a_greedy_client_cannot_have_the_server_killed(memory_mib: int, tmp_path: Path) -> None:
    settings = variables(render({"server": {"memoryMiB": memory_mib}}))
    settings["KVPOOL_SERVE_JOURNAL"] = str(tmp_path / "journal")
    limits = {name.removeprefix("KVPOOL_SERVE_MAX_").lower(): int(value) for name, value in settings.items() if "_MAX_" in name}
    port = free_port()
    address = f"127.0.0.1:{port}"
    with (
        limited_memory(memory_mib * 2**20) as prefix,
        CommandLineServer(address, environment={**settings, "KVPOOL_FRESH_PROCESSES": "1"}, prefix=prefix) as server,
        grpc.insecure_channel(address, [("grpc.max_receive_message_length", -1)]) as channel,
        connect(address, deadline_seconds=2.0) as client,
    ):
        stub = allocator_pb2_grpc.AllocatorServiceStub(channel)
        client.create_pool(pool_config("modest", 100))
        client.create_pool(greedy_pool("wide", 2**10, num_groups=256))
        client.create_pool(greedy_pool("deep", limits["total_blocks"] - 2**10 - 200))
        pools = itertools.count()
        made = until_refused(lambda: client.create_pool(pool_config(f"p-{next(pools)}", 3)), "TOO_MANY_POOLS")
        assert made == limits["pools"] - 3

        hashes = os.urandom(HASH_BYTES * PREFIX_TOKENS)
        sessions = [GreedySession(stub, "wide")]
        until_refused(lambda: sessions.append(GreedySession(stub, "deep")), "TOO_MANY_SESSIONS")
        assert len(sessions) == limits["sessions"]
        wide, *deep = sessions
        deep[0].free(deep[0].declare(1, PREFIX_TOKENS, hashes, admits=True))
        prefixes = [session.declare(1, PREFIX_TOKENS, hashes)[0] for session in deep]

        refused = [
            until_refused(lambda: deep[0].free(deep[0].declare(1, 2**14, admits=True)), "OUT_OF_MEMORY"),
            until_refused(lambda: wide.declare(1024, 1, id_bytes=255), "OUT_OF_MEMORY"),
            until_refused(lambda: deep[1].declare(1, 2**14), "OUT_OF_MEMORY"),
        ]
        print("blocks, requests, tokens:", refused, resident_mib(server.process.pid))
        for session, prefix_request in zip(deep, prefixes, strict=True):
            for _ in range(REMEMBERED_RESULTS):
                session.look_up(prefix_request)
        print("results", resident_mib(server.process.pid))
        with unread_watches(channel, "deep", limits["watches"]):
            free_calls = limits["calls"] - limits["watches"] - len(sessions)
            with incomplete_calls(port, free_calls, limits["message_bytes"]) as sent:
                print("watches, messages", sent >> 20, resident_mib(server.process.pid))
                assert sent > free_calls * limits["message_bytes"] * 0.9
        most_mib = resident_mib(server.process.pid)[1]
        assert server.is_alive
        assert most_mib < memory_mib
        for session in sessions:
            session.close()
        wait_until(lambda: modest_client_works(client), "another client is served", 60)
