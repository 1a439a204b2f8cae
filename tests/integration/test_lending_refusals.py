"""What a lender refuses. The processes that connect are this one, which maps no memory of others."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool.client import Client, KvpoolError, WrongStateError, connect
from kvpool.core.ranks.messages import DeclaredMemory
from kvpool.lending.lender_client import LentMemory, connect_lender
from kvpool.lending.lending_server import MAX_STRANGERS
from kvpool.v1 import lending_pb2
from kvpool.v1.link_pb2 import LinkHello
from kvpool.wire.frames import encode_frame
from kvpool.wire.link import Kind
from kvpool.wire.ranks import declared_to_proto
from support.lending import (
    BLOCK_BYTES,
    CONFIG,
    DECLARED,
    NUM_BLOCKS,
    LenderProcess,
    declared_with,
    introduced,
    lend_request,
    lender_process,
    lending_hello,
)
from support.raw_link import RawLink, steps_hello
from support.server import running_server
from support.waiting import DEADLINE_SECONDS, wait_until


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with running_server() as address:
        yield address


@pytest.fixture(scope="module")
def lender(server: str) -> Iterator[LenderProcess]:
    with lender_process(server) as lender:
        yield lender


@pytest.fixture(scope="module")
def memory(lender: LenderProcess) -> Iterator[LentMemory]:
    """The memory in use."""
    with mapped(lender.address, DECLARED) as memory:
        memory.buffer.fill_(7)
        yield memory


@pytest.fixture
def client(server: str) -> Iterator[Client]:
    with connect(server) as client:
        yield client


@contextlib.contextmanager
def mapped(address: str, declared: DeclaredMemory, pool: str = "m", token: str = "") -> Iterator[LentMemory]:
    lender = connect_lender(address, pool, token)
    try:
        yield lender.map(declared, DEADLINE_SECONDS)
    finally:
        lender.close()


def fingerprint(**entries: str) -> dict[str, Any]:
    return {"fingerprint": tuple(sorted(entries.items()))}


@pytest.mark.parametrize(
    ("change", "reason", "field"),
    [
        (fingerprint(dtype="float32", model="gemma"), "MEMORY_DIFFERS", 'declared.fingerprint["model"]'),
        (fingerprint(dtype="float16", model="llama"), "MEMORY_DIFFERS", 'declared.fingerprint["dtype"]'),
        (fingerprint(dtype="float32"), "MEMORY_DIFFERS", 'declared.fingerprint["model"]'),
        (fingerprint(dtype="float32", model="llama", rank_p="2"), "MEMORY_DIFFERS", 'declared.fingerprint["rank_p"]'),
        (fingerprint(dtype="float32", model="llama", tp="2"), "MEMORY_DIFFERS", 'declared.fingerprint["tp"]'),
        ({"config": replace(CONFIG, max_model_len=65)}, "MEMORY_DIFFERS", "declared.config.max_model_len"),
        ({"config": replace(CONFIG, use_eagle=True)}, "MEMORY_DIFFERS", "declared.config.use_eagle"),
        ({"config": replace(CONFIG, num_blocks=16)}, "MEMORY_DIFFERS", "declared.config.num_blocks"),
        ({"size_bytes": NUM_BLOCKS * BLOCK_BYTES // 2}, "MEMORY_DIFFERS", "declared.size_bytes"),
        ({"size_bytes": NUM_BLOCKS * BLOCK_BYTES - 1}, "INVALID_VALUE", "declared.size_bytes"),
    ],
)
def test_an_engine_that_does_not_fit_the_memory_in_use_is_refused(  # noqa: PLR0913, PLR0917 - the case
    lender: LenderProcess, memory: LentMemory, client: Client, change: dict[str, Any], reason: str, field: str
) -> None:
    before = client.get_pool("m")
    with pytest.raises(KvpoolError) as caught, mapped(lender.address, replace(DECLARED, **change)):
        pass
    assert (caught.value.reason, caught.value.field) == (reason, field)
    assert client.get_pool("m") == before
    assert int(memory.buffer.sum()) == 7 * DECLARED.size_bytes


def test_an_engine_of_another_pool_is_refused(lender: LenderProcess) -> None:
    with pytest.raises(WrongStateError) as caught, mapped(lender.address, DECLARED, pool="other"):
        pass
    assert (caught.value.reason, caught.value.field) == ("OTHER_POOL", "pool_name")


@pytest.mark.usefixtures("memory")
def test_offers_state_the_weights_of_the_newest_engine_that_was_not_refused(lender: LenderProcess) -> None:
    offered = []
    for declared, weights_bytes in ((DECLARED, 5), (DECLARED, 0), (declared_with(2), 9)):
        engine = connect_lender(lender.address, "m")
        with contextlib.suppress(WrongStateError):
            engine.map(declared, DEADLINE_SECONDS, weights_bytes=weights_bytes)
        engine.close()
        newest = connect_lender(lender.address, "m")
        offered.append(newest.offer.weights_bytes)
        newest.close()
    assert offered == [5, 5, 5]


def test_the_server_names_the_processes_that_map_the_memory(memory: LentMemory, client: Client) -> None:
    assert memory.buffer.numel()

    def named() -> bool:
        (rank,) = client.get_pool("m").ranks
        return [each.pid for each in rank.mapping_processes] == [os.getpid()]

    wait_until(named, "a heartbeat has named this process")


def test_more_memory_than_the_lender_may_lend_is_refused(server: str, client: Client) -> None:
    with lender_process(server, pool="small") as lender:
        small = replace(declared_with(2 * NUM_BLOCKS), config=replace(CONFIG, name="small", num_blocks=2 * NUM_BLOCKS))
        with pytest.raises(KvpoolError) as caught, mapped(lender.address, small, pool="small"):
            pass
        assert caught.value.field == "declared.size_bytes"
    with pytest.raises(KvpoolError):
        client.get_pool("small")


def test_a_token_is_required_if_the_lender_has_one(server: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    declared = replace(DECLARED, config=replace(CONFIG, name="secured"))
    with lender_process(server, 0, 1, "--lend-token-file", str(token), pool="secured") as lender:
        for wrong in ("", "secre", "secret\n"):
            with pytest.raises(KvpoolError) as caught, mapped(lender.address, declared, "secured", wrong):
                pass
            assert (caught.value.reason, caught.value.field) == ("WRONG_TOKEN", "token")
        with mapped(lender.address, declared, "secured", "secret") as memory:
            assert memory.num_blocks == NUM_BLOCKS


@contextlib.contextmanager
def forked(act: Callable[[], None]) -> Iterator[None]:
    """A process that is forked from this one."""
    pid = os.fork()
    if not pid:
        try:
            act()
        finally:
            os._exit(0)
    yield
    os.waitpid(pid, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_process_of_another_user_is_refused(lender: LenderProcess) -> None:
    path = Path(lender.address.removeprefix("unix:"))
    lender.folder.chmod(0o711)
    path.chmod(0o666)  # as a careless operator does
    reader, writer = os.pipe()

    def connect_as_nobody() -> None:
        os.setuid(65534)
        with RawLink(lender.address) as connection:
            os.write(writer, connection.refusal().reason.encode())

    with forked(connect_as_nobody):
        os.close(writer)
    assert os.read(reader, 4096) == b"OTHER_USER"
    os.close(reader)


@pytest.mark.parametrize("kind", ["map", "bind", "unmap"])
def test_a_process_that_inherits_a_connection_is_refused(
    lender: LenderProcess, memory: LentMemory, kind: str, client: Client
) -> None:
    """Its steps would run under the name of its parent, and count as ended when the parent exits."""
    request = {
        "map": lend_request(map=lending_pb2.Map(declared=declared_to_proto(DECLARED))),
        "bind": lend_request(bind=lending_pb2.Bind(epoch=memory.epoch, session_number=1)),
        "unmap": lend_request(unmap=lending_pb2.Unmap()),
    }
    before = client.get_pool("m")
    with introduced(lender.address) as connection, forked(lambda: connection.send(request[kind])):
        assert connection.refusal().reason == "OTHER_PROCESS"
    assert client.get_pool("m") == before


@pytest.mark.usefixtures("memory")
def test_a_connection_ends_with_the_process_that_introduced_itself(
    lender: LenderProcess, caplog: pytest.LogCaptureFixture
) -> None:
    mine, its = socket.socketpair()

    def introduce_and_exit() -> None:
        connection = introduced(lender.address)
        socket.send_fds(its, [b"greeted"], [connection.socket.fileno()])

    with mine, its, forked(introduce_and_exit):
        _, (number,), _, _ = socket.recv_fds(mine, 100, 1)
    with socket.socket(fileno=number) as inherited:
        inherited.settimeout(DEADLINE_SECONDS)
        assert inherited.recv(4096) == b""
    assert "lender lost" not in caplog.messages


@pytest.mark.parametrize("wrong_epochs", [0, 1], ids=["answers", "refusals"])
def test_a_process_that_does_not_read_is_disconnected(
    lender: LenderProcess, memory: LentMemory, caplog: pytest.LogCaptureFixture, wrong_epochs: int
) -> None:
    name = f"deaf-{wrong_epochs}"
    bind = lending_pb2.Bind(epoch=memory.epoch + wrong_epochs, session_number=1000)
    with introduced(lender.address, client_name=name, client_id=name) as connection, contextlib.suppress(OSError):
        connection.send(lend_request(bind=bind) * 100_000)
    lender.wait_for(f"engine does not read .*client={name} .*pid={os.getpid()}")
    with introduced(lender.address):
        assert "lender lost" not in caplog.messages
    later = lender.log.partition(f"client={name}")[2]
    assert "lending refused" not in later  # what it had sent before is dropped


def test_requests_of_a_connection_that_was_replaced_are_refused_together(
    lender: LenderProcess, memory: LentMemory
) -> None:
    bind = lend_request(bind=lending_pb2.Bind(epoch=memory.epoch, session_number=1000))
    with introduced(lender.address) as earlier:
        lender.pause()
        earlier.send(bind * 2000)  # the lender reads all of them together
        with RawLink(lender.address, lending_hello()) as later:
            lender.resume()
            later.welcome()
            while earlier.next():
                pass
        with introduced(lender.address):
            assert sum("CONNECTION_REPLACED" in line for line in lender.lines) <= 1


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff\xff\xff\xffgarbage", "MALFORMED"),
        (lend_request(map=lending_pb2.Map()), "MALFORMED"),
        (steps_hello("server"), "OTHER_SERVER"),
        (encode_frame(Kind.HELLO, LinkHello(protocol_version=9).SerializeToString()), "PROTOCOL_VERSION"),
        (lending_hello(pool_name="\1"), "INVALID_VALUE"),
        (lending_hello() + lend_request(), "INVALID_VALUE"),
        (lending_hello() + encode_frame(Kind.REQUEST, b"\xff"), "MALFORMED"),
    ],
    ids=["kind", "no hello", "steps", "version", "pool", "empty", "request"],
)
def test_garbage_is_refused_and_ends_the_connection_only(
    lender: LenderProcess, caplog: pytest.LogCaptureFixture, data: bytes, reason: str
) -> None:
    with RawLink(lender.address, data) as connection:
        assert connection.refusal().reason == reason
    assert "lender lost" not in caplog.messages
    with mapped(lender.address, DECLARED) as second:
        assert second.num_blocks == NUM_BLOCKS


def test_connections_without_an_introduction_do_not_keep_engines_out(lender: LenderProcess) -> None:
    with contextlib.ExitStack() as closing:
        strangers = [closing.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(MAX_STRANGERS + 20)]
        for stranger in strangers:
            stranger.connect(lender.address.removeprefix("unix:"))
            stranger.settimeout(DEADLINE_SECONDS)
        assert strangers[0].recv(4096) == b""
        with mapped(lender.address, DECLARED) as memory:
            assert memory.num_blocks == NUM_BLOCKS


def test_many_uses_of_the_memory_in_one_process_are_watched_by_one_descriptor(
    lender: LenderProcess, memory: LentMemory
) -> None:
    def num_watched() -> int:
        found = 0
        for descriptor in Path(f"/proc/{lender.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found += "pidfd" in str(descriptor.readlink())
        return found

    before = num_watched()  # this process is one of them
    for i in range(3):
        with introduced(lender.address, client_id=f"use-{i}") as connection:
            connection.send(lend_request(bind=lending_pb2.Bind(epoch=memory.epoch, session_number=2000)))
            assert connection.next()
    assert num_watched() == before


def test_a_connection_that_another_one_replaces_ends(lender: LenderProcess) -> None:
    with introduced(lender.address) as earlier, introduced(lender.address):
        assert earlier.next() is None


def test_connections_leave_nothing_behind(lender: LenderProcess) -> None:
    descriptors = Path(f"/proc/{lender.pid}/fd")

    def connect_once() -> None:
        connect_lender(lender.address, "m").close()

    connect_once()
    before = len(list(descriptors.iterdir()))
    for _ in range(20):
        connect_once()
    wait_until(lambda: len(list(descriptors.iterdir())) <= before, "the descriptors are closed", DEADLINE_SECONDS)
