"""The limits that the chart computes from the memory of a container keep a greedy client from having it killed."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import grpc
import pytest

from kvpool.client import KvpoolError, connect
from kvpool.v1 import allocator_pb2_grpc
from support.greedy_client import (
    HASH_BYTES,
    GreedySession,
    greedy_pool,
    incomplete_calls,
    refused_at_once,
    resident_mib,
    unread_watches,
)
from support.helm import memory_limit_mib, render, variables
from support.server import CommandLineServer, free_port, pool_config
from support.waiting import DEADLINE_SECONDS, wait_until

PREFIX_TOKENS: Final = 2**15
REMEMBERED_RESULTS: Final = 16
LIMIT: Final = "KVPOOL_SERVE_MAX_"
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
            if error.reason != reason:
                raise
            return count
    raise AssertionError


def modest_client_works(address: str) -> bool:
    """Whether a new session of another pool gets blocks."""
    try:
        with connect(address, deadline_seconds=10.0) as client, client.open_session("modest") as session:
            return session.admit(session.request("r", range(40))) is not None
    except KvpoolError as error:
        print(f"another client: {error!r}")  # noqa: T201 - pytest shows it
        return False


@pytest.mark.slow
@pytest.mark.parametrize("memory_mib", [2048, pytest.param(4096, marks=pytest.mark.complete)])
def test_a_greedy_client_cannot_have_the_shipped_server_killed(memory_mib: int, tmp_path: Path) -> None:
    """The smallest memory that the chart takes, in which the server itself has the largest part, and the default."""
    objects = render({"server": {"memoryMiB": memory_mib}})
    settings = variables(objects)
    assert memory_limit_mib(objects) == memory_mib
    settings |= {"KVPOOL_SERVE_JOURNAL": str(tmp_path / "journal"), "KVPOOL_SERVE_NO_JOURNAL": "0"}
    # On a slow machine, a connection of the greedy client answers no pings for long, because another one is sending.
    settings |= {f"KVPOOL_SERVE_{name}_SECONDS": "3600" for name in ("STALL", "DEAD_PEER")}
    limits = {name: int(value) for name, value in settings.items() if name.startswith(LIMIT)}
    num_blocks, num_calls, num_watches, num_sessions, message_bytes = (
        limits[f"{LIMIT}{name}"] for name in ("TOTAL_BLOCKS", "CALLS", "WATCHES", "SESSIONS", "MESSAGE_BYTES")
    )
    port = free_port()
    address = f"127.0.0.1:{port}"
    with (
        limited_memory(memory_mib * 2**20) as prefix,
        CommandLineServer(address, environment={**settings, "KVPOOL_FRESH_PROCESSES": "1"}, prefix=prefix) as server,
        grpc.insecure_channel(address, [("grpc.max_receive_message_length", -1)]) as channel,
        connect(address, deadline_seconds=DEADLINE_SECONDS) as client,
    ):
        pid = server.process.pid
        stub = allocator_pb2_grpc.AllocatorServiceStub(channel)
        client.create_pool(pool_config("modest", 100))
        client.create_pool(greedy_pool("wide", 2**10, num_groups=256))
        client.create_pool(greedy_pool("deep", num_blocks - 2**10 - 200, num_groups=2))
        pools = itertools.count()
        until_refused(lambda: client.create_pool(pool_config(f"p-{next(pools)}", 3)), "TOO_MANY_POOLS")

        sessions = [GreedySession(stub, "wide")]
        until_refused(lambda: sessions.append(GreedySession(stub, "deep")), "TOO_MANY_SESSIONS")
        assert len(sessions) == num_sessions
        wide, *deep = sessions
        hashes = os.urandom(HASH_BYTES * PREFIX_TOKENS)
        deep[0].free(deep[0].declare(1, PREFIX_TOKENS, hashes, admits=True))
        prefixes = [session.declare(1, PREFIX_TOKENS, hashes)[0] for session in deep]

        until_refused(lambda: deep[0].free(deep[0].declare(1, 2**14, admits=True)), "OUT_OF_MEMORY")
        until_refused(lambda: wide.declare(1024, 1, id_bytes=255), "OUT_OF_MEMORY")
        until_refused(lambda: deep[1].declare(1, 2**14), "OUT_OF_MEMORY")
        assert resident_mib(pid)[0] > limits[f"{LIMIT}MEMORY_BYTES"] / 2**20 / 2, "the memory is what refuses"
        for session, number in zip(deep, prefixes, strict=True):
            for _ in range(REMEMBERED_RESULTS):
                session.look_up(number)
        num_free_calls = num_calls - num_watches - num_sessions
        with (
            unread_watches(channel, "deep", num_watches),
            incomplete_calls(port, num_free_calls, message_bytes) as sent_bytes,
        ):
            assert sent_bytes > num_free_calls * message_bytes * 0.9
            assert refused_at_once(deep, message_bytes // (HASH_BYTES + 2)) > 0, "they wait, and need too much"
            assert server.is_alive
            now_mib, most_mib = resident_mib(pid)
            print(f"resident: {now_mib} MiB, at most {most_mib} of {memory_mib}")  # noqa: T201 - pytest shows it
            assert most_mib < memory_mib
        for session in sessions:
            session.close()
        # The server looks every 30 s for freed memory that it can return.
        wait_until(lambda: modest_client_works(address), "another client is served", 300)
