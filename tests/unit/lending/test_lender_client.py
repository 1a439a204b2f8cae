"""Numbers in names of rules are those of lending/lender_client.py."""

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvpool.core.errors import (
    DeniedError,
    InvalidArgumentError,
    KvpoolError,
    UnauthenticatedError,
    UnavailableError,
    WrongStateError,
)
from kvpool.core.ids import TableLease
from kvpool.lending.fence import StaleTablesError, StepTicket
from kvpool.lending.lender_client import LenderClient, LentMemory, connect_lender
from kvpool.v1 import lending_pb2
from kvpool.v1.link_pb2 import LinkWelcome
from kvpool.wire import link
from kvpool.wire.errors import DeadlineError, ServerError
from kvpool.wire.frames import HEAD, encode_frame
from kvpool.wire.link import Kind
from kvpool.wire.pools import config_from_proto
from support.fake_lender import FakeLender, answer_frame
from support.lender_transcript import DECLARED, SIZE_BYTES, LenderTranscript, fake_lender, lease
from support.transcripts import check
from support.waiting import DEADLINE_SECONDS, wait_until

GIVEN = "a-token"
BLOCK_BYTES = SIZE_BYTES // 16
PATHS = sorted(Path(__file__).with_name("lender_transcripts").glob("*.txt"))


@pytest.fixture
def fake() -> Iterator[FakeLender]:
    with fake_lender() as lender:
        yield lender


@pytest.fixture
def lender(fake: FakeLender) -> Iterator[LenderClient]:
    connected = connect_lender(fake.address, "m", GIVEN, "engine")
    yield connected
    connected.close()


@pytest.fixture
def memory(lender: LenderClient) -> LentMemory:
    return lender.map(DECLARED, 10.0)


@pytest.fixture
def memory_with_host(fake: FakeLender, lender: LenderClient) -> LentMemory:
    fake.add_host(3, 3 * BLOCK_BYTES)
    return lender.map(DECLARED, 10.0)


def run(memory: LentMemory, *numbers: int) -> None:
    for number in numbers:
        with memory.step(lease(number)):
            pass


def descriptors_in(folder: Path) -> list[str]:
    """Files in a folder that this process has open."""
    with os.scandir("/proc/self/fd") as numbers:
        return [
            path
            for number in numbers
            if (path := os.path.realpath(number.path)).startswith((f"{folder}/memory", f"{folder}/host"))
        ]


def permissions_at(address: int) -> str:
    """Permissions of what is mapped at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(each, 16) for each in line.split()[0].split("-"))
        if first <= address < end:
            return line.split()[1]
    return ""


def finish(tickets: list[StepTicket]) -> None:
    for ticket in tickets:
        ticket.done()


def refused(memory: LentMemory, stale: TableLease) -> str:
    with pytest.raises(StaleTablesError) as caught:
        memory.step(stale)
    return caught.value.reason


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_client_does_what_the_transcript_shows(path: Path) -> None:
    with contextlib.ExitStack() as opened:
        check(path, LenderTranscript(opened).execute)


# Connecting.


def test_a_process_introduces_itself_and_learns_what_the_lender_has(fake: FakeLender, lender: LenderClient) -> None:
    (hello,) = fake.wait_for("hello")
    assert hello.token == GIVEN
    assert hello.lending.client_id
    hello.lending.ClearField("client_id")
    assert hello.lending == lending_pb2.LendingHello(pool_name="m", client_name="engine")
    assert lender.offer.available_bytes == SIZE_BYTES
    assert not lender.offer.is_lent


@pytest.mark.parametrize("address", ["", "unix:", "unix:relative", "127.0.0.1:5", "/path"])
def test_other_forms_of_addresses_are_refused(address: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is not an address of the form unix:/path"):
        connect_lender(address, "m")


def test_sockets_without_a_lender_are_told_apart(tmp_path: Path, fake: FakeLender) -> None:
    with pytest.raises(UnavailableError, match=r"no such socket; does `kvpool worker --lend` run on this machine\?"):
        connect_lender(f"unix:{tmp_path}/none", "m")
    fake.stop()
    with pytest.raises(UnavailableError, match="nothing listens on the socket"):
        connect_lender(fake.address, "m")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        HEAD.pack(2**20, Kind.WELCOME),
        link.welcome(LinkWelcome()),
        UnavailableError(link.OTHER_SERVER, "this server takes steps", retry_seconds=0.0),
    ],
    ids=["kind", "size", "stream", "refusal"],
)
def test_another_program_is_no_lender(fake: FakeLender, answer: bytes | KvpoolError) -> None:
    fake.answers["hello"] = answer
    with pytest.raises(WrongStateError, match="another program listens there") as caught:
        connect_lender(fake.address, "m")
    assert caught.value.reason == "NOT_A_LENDER"


def test_another_version_is_refused(fake: FakeLender) -> None:
    fake.answers["hello"] = encode_frame(Kind.WELCOME, LinkWelcome(protocol_version=9).SerializeToString())
    with pytest.raises(ServerError, match=r"speaks protocol version 9, .* use the same release") as caught:
        connect_lender(fake.address, "m")
    assert caught.value.reason == "PROTOCOL_VERSION"


@pytest.mark.parametrize(
    "error",
    [
        WrongStateError("OTHER_POOL", "this rank is of pool other", field="pool_name"),
        DeniedError("OTHER_USER", "the socket is for user 7"),
        UnauthenticatedError("TOKEN", "unknown token"),
    ],
    ids=lambda error: error.reason,
)
def test_refusals_of_the_lender_reach_the_caller(fake: FakeLender, error: KvpoolError) -> None:
    fake.answers["hello"] = error
    with pytest.raises(type(error), match=error.message) as caught:
        connect_lender(fake.address, "m")
    assert (caught.value.reason, caught.value.field) == (error.reason, error.field)


@pytest.mark.parametrize("answer", [None, b"\x00\x00", HEAD.pack(9, Kind.WELCOME)], ids=["nothing", "head", "half"])
def test_an_answer_that_does_not_come_in_time_is_not_waited_for(fake: FakeLender, answer: bytes | None) -> None:
    fake.answers["hello"] = answer
    with pytest.raises(DeadlineError, match="does not answer in time"):
        connect_lender(fake.address, "m", timeout_seconds=0.05)


# Mapping.


def test_memory_is_mapped_as_it_is_and_shared(fake: FakeLender, lender: LenderClient) -> None:
    fake.memory.write_bytes(bytes(range(256)) * 16)
    memory = lender.map(DECLARED, 10.0)
    assert memory.num_blocks == 16
    assert memory.buffer.dtype == torch.int8
    assert bytes(memory.buffer.numpy().tobytes()) == fake.memory.read_bytes()
    memory.buffer[5] = 77
    assert fake.memory.read_bytes()[5] == 77
    (request,) = fake.wait_for("map")
    declared = request.declared
    assert not config_from_proto(declared.config).difference(DECLARED.config)
    assert (declared.size_bytes, dict(declared.fingerprint)) == (SIZE_BYTES, dict(DECLARED.fingerprint))


def test_memory_stays_mapped_as_long_as_a_view_exists(fake: FakeLender, lender: LenderClient) -> None:
    memory = lender.map(DECLARED, 10.0)
    view = memory.buffer.view(torch.float32)[3:]
    memory.close()
    del memory
    view[0] = 1.0
    assert fake.memory.read_bytes()[12:16] == b"\x00\x00\x80\x3f"


def test_host_memory_is_mapped_beside_the_memory_and_shared(fake: FakeLender, lender: LenderClient) -> None:
    host = fake.add_host(3, 4 * BLOCK_BYTES)  # the pool has fewer blocks than this rank
    memory = lender.map(DECLARED, 10.0)
    assert memory.host is not None
    assert (memory.host.shape, memory.host.dtype) == ((3, BLOCK_BYTES), torch.int8)
    memory.host[2, 1] = 77
    assert host.read_bytes()[2 * BLOCK_BYTES + 1] == 77
    assert fake.memory.read_bytes() == bytes(SIZE_BYTES)
    host.write_bytes(b"\x05" * 4 * BLOCK_BYTES)
    assert memory.host.eq(5).all()


def test_without_blocks_in_host_memory_none_is_mapped(fake: FakeLender, lender: LenderClient) -> None:
    fake.add_host(0, BLOCK_BYTES)
    assert lender.map(DECLARED, 10.0).host is None


@pytest.mark.parametrize(("num_files", "num_blocks"), [(0, 1), (2, 1), (2, 0)])
def test_another_number_of_descriptors_is_refused(
    fake: FakeLender, lender: LenderClient, num_files: int, num_blocks: int
) -> None:
    for _ in range(num_files):
        fake.add_host(num_blocks, BLOCK_BYTES)
    fake.num_host_blocks = num_blocks
    with pytest.raises(InvalidArgumentError, match=f"{1 + num_files} descriptors of memory, and {num_blocks} blocks"):
        lender.map(DECLARED, 10.0)
    lender.close()
    wait_until(lambda: not descriptors_in(fake.memory.parent), "all are closed")


def test_host_memory_that_is_too_small_is_refused_and_nothing_stays_mapped(
    fake: FakeLender, lender: LenderClient
) -> None:
    fake.add_host(3, 2 * BLOCK_BYTES)
    with pytest.raises(WrongStateError, match=f"has {2 * BLOCK_BYTES} bytes, and the engine needs {3 * BLOCK_BYTES}"):
        lender.map(DECLARED, 10.0)
    fake.wait_for("unmap")
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if str(fake.memory.parent) in line]


def test_a_pool_with_another_number_of_blocks_in_host_memory_is_other_memory(
    fake: FakeLender, memory_with_host: LentMemory
) -> None:
    run(memory_with_host, 1)
    fake.num_host_blocks = 2
    fake.epoch = 8
    fake.disconnect()
    fake.wait_for("map", 2)
    assert refused(memory_with_host, lease(2, epoch=8)) == "MEMORY_CHANGED"


def test_memory_that_is_too_small_is_refused(fake: FakeLender, lender: LenderClient) -> None:
    fake.memory.write_bytes(b"x" * 100)
    with pytest.raises(WrongStateError, match="has 100 bytes, and the engine needs 4096") as caught:
        lender.map(DECLARED, 10.0)
    assert caught.value.reason == "DESCRIPTOR_TOO_SMALL"
    fake.wait_for("unmap")


@pytest.mark.parametrize(("field", "value"), [("size_bytes", 8192), ("num_blocks", 17)])
def test_memory_of_another_size_is_refused(fake: FakeLender, lender: LenderClient, field: str, value: int) -> None:
    fake.answers["map"] = mapped = lending_pb2.Mapped(epoch=7, num_blocks=16, size_bytes=SIZE_BYTES)
    setattr(mapped, field, value)
    with pytest.raises(WrongStateError, match=f"{field}: the lender has {value}") as caught:
        lender.map(DECLARED, 10.0)
    assert caught.value.reason == "SIZE_DIFFERS"


def test_memory_on_other_devices_is_refused(fake: FakeLender) -> None:
    fake.offer.device = "tpu:0"
    lender = connect_lender(fake.address, "m")
    with pytest.raises(InvalidArgumentError, match="memory on tpu:0 cannot be mapped") as caught:
        lender.map(DECLARED, 10.0)
    assert caught.value.reason == "UNSUPPORTED_DEVICE"
    lender.close()


@pytest.mark.parametrize(
    "answer",
    [
        link.welcome(LinkWelcome(lending=lending_pb2.LendingOffer(device="cpu"))),
        answer_frame(bound=lending_pb2.Bound()),
        answer_frame(),
        encode_frame(Kind.ANSWER, b"\xff"),
        encode_frame(Kind.REFUSED, b"\xff"),
        answer_frame(mapped=lending_pb2.Mapped()),  # without the memory
    ],
    ids=["welcome", "bound", "empty", "garbage", "refusal", "no descriptor"],
)
def test_anything_else_than_memory_is_refused(fake: FakeLender, lender: LenderClient, answer: bytes) -> None:
    fake.answers["map"] = answer
    with pytest.raises(KvpoolError) as caught:
        lender.map(DECLARED, 10.0)
    assert caught.value.reason == "MALFORMED"


def test_a_refused_layout_can_be_corrected(fake: FakeLender, lender: LenderClient) -> None:
    fake.answers["map"] = WrongStateError("LAYOUT_DIFFERS", "float16 is not float32", field="fingerprint.dtype")
    with pytest.raises(WrongStateError, match=r"fingerprint\.dtype: float16 is not float32"):
        lender.map(DECLARED, 10.0)
    del fake.answers["map"]
    run(lender.map(DECLARED, 10.0), 1)
    with pytest.raises(WrongStateError, match="has mapped the memory before"):
        lender.map(DECLARED, 10.0)


# Steps.


def test_rule_1_a_fence_that_was_sent_before_a_step_is_in_force(fake: FakeLender, memory: LentMemory) -> None:
    for sequence in range(1, 200):
        run(memory, sequence)
        fake.fence(sequence, last=sequence)
        assert refused(memory, lease(sequence)) == "SESSION_ENDED"


def test_a_fence_may_come_in_pieces(fake: FakeLender, memory: LentMemory) -> None:
    run(memory, 1)
    fence = lending_pb2.LendFence(fence_sequence=1, epoch=7, last_session_number=1)
    data = answer_frame(fence=fence)
    for i in range(len(data) - 1):
        fake.send(data[i : i + 1])
        run(memory, 1)
    fake.send(data[-1:])
    assert refused(memory, lease(1)) == "SESSION_ENDED"


def test_a_process_without_descriptors_connects_later(
    fake: FakeLender, memory: LentMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = threading.Event()

    def fail(*_: object) -> None:
        made.set()
        raise OSError(errno.EMFILE, "Too many open files")

    run(memory, 1)
    with monkeypatch.context() as full:
        full.setattr("kvpool.lending.connection.socket.socket", fail)
        fake.disconnect()
        assert made.wait(DEADLINE_SECONDS)
    fake.wait_for("map", 2)
    fake.wait_for("bind", 2)
    run(memory, 1)


def test_rule_6_memory_is_mapped_again_at_its_addresses(
    fake: FakeLender, memory: LentMemory, caplog: pytest.LogCaptureFixture
) -> None:
    fake.memory.write_bytes(b"\x05" * SIZE_BYTES)
    address, view = memory.buffer.data_ptr(), memory.buffer[8:16]
    for _ in range(2):
        memory.unmap()
        memory.map_again()
        assert (memory.buffer.data_ptr(), view.tolist()) == (address, [5] * 8)
    assert "lender lost" not in caplog.messages


def test_rule_6_host_memory_is_unmapped_and_mapped_again_with_the_memory(memory_with_host: LentMemory) -> None:
    host = memory_with_host.host
    assert host is not None
    address, view = host.data_ptr(), host[1]
    view.fill_(7)
    for _ in range(2):
        memory_with_host.unmap()
        assert permissions_at(address) == "---p"
        memory_with_host.map_again()
        assert memory_with_host.host is host
        assert (host.data_ptr(), bool(view.eq(7).all())) == (address, True)


# Broken connections.


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 8,
        encode_frame(Kind.ANSWER, b"\xff"),
        answer_frame(bound=lending_pb2.Bound()),
        answer_frame(fence=lending_pb2.LendFence()),
        HEAD.pack(link.MAX_LENDING_BYTES + 1, Kind.ANSWER),
    ],
    ids=["kind", "answer", "no request", "fence without a number", "size"],
)
def test_garbage_ends_the_connection(
    fake: FakeLender, memory: LentMemory, caplog: pytest.LogCaptureFixture, garbage: bytes
) -> None:
    run(memory, 1)
    fake.send(garbage)
    fake.wait_for("map", 2)
    fake.wait_for("bind", 2)
    run(memory, 1)
    assert caplog.messages.count("lender lost") == 1


def test_rule_4_steps_of_an_ended_epoch_use_the_old_memory_alone(fake: FakeLender, memory: LentMemory) -> None:
    """Lender, memory and epoch are replaced, and the thread has connected and learned nothing yet."""
    run(memory, 1)
    fake.stop()
    fake.replace_memory()
    fake.epoch, fake.answers["hello"] = 8, None
    fake.start()
    fake.wait_for("hello", 2)
    with memory.step(lease(1)):
        memory.buffer.fill_(1)
    assert fake.memory.read_bytes() == b"\x00" * SIZE_BYTES
    del fake.answers["hello"]
    fake.answer_last("hello")
    assert refused(memory, lease(2, epoch=8)) == "MEMORY_CHANGED"  # waits for the thread
    assert refused(memory, lease(1)) == "MEMORY_CHANGED"
    assert fake.memory.read_bytes() == b"\x00" * SIZE_BYTES


def test_rule_8_a_forked_process_runs_no_step_and_gives_nothing_back(fake: FakeLender, memory: LentMemory) -> None:
    run(memory, 1)
    before = len(fake.requests)
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        for use in (memory.step, memory.bind):
            try:
                use(lease(1))
            except KvpoolError as error:
                os.write(writer, error.reason.encode() + b" ")
        memory.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 100) == b"FORKED FORKED "
    for number in (reader, writer):
        os.close(number)
    run(memory, 1)
    assert len(fake.requests) == before
