"""Numbers in names of rules are those of lending/lender_client.py."""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from kvpool.core.errors import (
    AbortedError,
    DeniedError,
    InvalidArgumentError,
    KvpoolError,
    UnauthenticatedError,
    UnavailableError,
    WrongStateError,
)
from kvpool.core.ids import SessionNumber, TableLease
from kvpool.core.ranks.messages import DeclaredMemory
from kvpool.core.specs.pool_config import HashScheme
from kvpool.lending.fence import StaleTablesError, StepTicket
from kvpool.lending.lender_client import LenderClient, LentMemory, connect_lender
from kvpool.v1 import lending_pb2
from kvpool.wire.errors import DeadlineError
from kvpool.wire.lending import encode_message
from kvpool.wire.pools import config_from_proto
from support.core import config
from support.fake_lender import FakeLender
from support.waiting import DEADLINE_SECONDS

SIZE_BYTES = 4096
GIVEN = "a-token"
DECLARED = DeclaredMemory(
    config(num_blocks=16, hash_scheme=HashScheme(none_hash=b"n" * 32)),
    SIZE_BYTES,
    (("dtype", "float32"), ("model", "m")),
)
OFFER = lending_pb2.LendResponse(offer=lending_pb2.Offer(lending_version=2, device="cpu"))


def lease(number: int, epoch: int = 7) -> TableLease:
    return TableLease(epoch, SessionNumber(number))


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as path:  # shorter than tmp_path: the address of a socket is limited
        yield Path(path)


@pytest.fixture
def fake(folder: Path) -> Iterator[FakeLender]:
    lender = FakeLender(folder, SIZE_BYTES)
    yield lender
    lender.stop()


@pytest.fixture
def lender(fake: FakeLender) -> Iterator[LenderClient]:
    connected = connect_lender(fake.address, "m", GIVEN, "engine")
    yield connected
    connected.close()


@pytest.fixture
def memory(lender: LenderClient) -> LentMemory:
    return lender.map(DECLARED, 10.0)


def run(memory: LentMemory, *numbers: int) -> None:
    for number in numbers:
        with memory.step(lease(number)):
            pass


def finish(tickets: list[StepTicket]) -> None:
    for ticket in tickets:
        ticket.done()


def run_forever(memory: LentMemory) -> None:
    while True:
        run(memory, 1)


def refused(memory: LentMemory, stale: TableLease) -> str:
    with pytest.raises(StaleTablesError) as caught:
        memory.step(stale)
    return caught.value.reason


# Connecting.


def test_a_process_introduces_itself_and_learns_what_the_lender_has(fake: FakeLender, lender: LenderClient) -> None:
    (hello,) = fake.wait_for("hello")
    assert isinstance(hello, lending_pb2.Hello)
    assert hello.client_id
    hello.ClearField("client_id")
    assert hello == lending_pb2.Hello(lending_version=2, pool_name="m", token=GIVEN, client_name="engine")
    assert lender.offer.available_bytes == SIZE_BYTES
    assert not lender.offer.is_lent


@pytest.mark.parametrize("address", ["", "unix:", "unix:relative", "127.0.0.1:5", "/path"])
def test_other_forms_of_addresses_are_refused(address: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is not an address of the form unix:/path"):
        connect_lender(address, "m")


def test_sockets_without_a_lender_are_told_apart(folder: Path, fake: FakeLender) -> None:
    with pytest.raises(UnavailableError, match=r"no such socket; does `kvpool worker --lend` run on this machine\?"):
        connect_lender(f"unix:{folder}/none", "m")
    fake.stop()
    with pytest.raises(UnavailableError, match="nothing listens on the socket"):
        connect_lender(fake.address, "m")


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\x00\x00\x03\xff\xff\xff"])
def test_another_program_is_no_lender(fake: FakeLender, answer: bytes) -> None:
    fake.answers["hello"] = answer
    with pytest.raises(WrongStateError, match="another program listens there") as caught:
        connect_lender(fake.address, "m")
    assert caught.value.reason == "NOT_A_LENDER"


def test_another_version_is_refused(fake: FakeLender) -> None:
    fake.offer.lending_version = 1
    with pytest.raises(WrongStateError, match=r"the lender uses version 1, this process 2\. Use the same release"):
        connect_lender(fake.address, "m")


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


@pytest.mark.parametrize("answer", [None, b"\x00\x00", b"\x00\x00\x00\x09\x0a"], ids=["nothing", "length", "half"])
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
    declared = request.declared  # type: ignore[attr-defined]
    assert not config_from_proto(declared.config).difference(DECLARED.config)
    assert (declared.size_bytes, dict(declared.fingerprint)) == (SIZE_BYTES, dict(DECLARED.fingerprint))


def test_memory_stays_mapped_as_long_as_a_view_exists(fake: FakeLender, lender: LenderClient) -> None:
    memory = lender.map(DECLARED, 10.0)
    view = memory.buffer.view(torch.float32)[3:]
    memory.close()
    del memory
    view[0] = 1.0
    assert fake.memory.read_bytes()[12:16] == b"\x00\x00\x80\x3f"


def test_memory_that_is_too_small_is_refused(fake: FakeLender, lender: LenderClient) -> None:
    fake.memory.write_bytes(b"x" * 100)
    with pytest.raises(WrongStateError, match="has 100 bytes, and the engine needs 4096") as caught:
        lender.map(DECLARED, 10.0)
    assert caught.value.reason == "DESCRIPTOR_TOO_SMALL"
    fake.wait_for("unmap")


@pytest.mark.parametrize(("field", "value"), [("size_bytes", 8192), ("num_blocks", 17)])
def test_memory_of_another_size_is_refused(fake: FakeLender, lender: LenderClient, field: str, value: int) -> None:
    mapped = lending_pb2.Mapped(epoch=7, num_blocks=16, size_bytes=SIZE_BYTES)
    setattr(mapped, field, value)
    fake.answers["map"] = lending_pb2.LendResponse(mapped=mapped)
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
        OFFER,
        lending_pb2.LendResponse(bound=lending_pb2.Bound()),
        lending_pb2.LendResponse(),
        lending_pb2.LendResponse(refused=b"\xff"),
        lending_pb2.LendResponse(mapped=lending_pb2.Mapped()).SerializeToString(),
        b"\x00\x00\x00\x02\x12\x00",  # Mapped without the memory
        b"\xff" * 8,
    ],
    ids=range(7),
)
def test_anything_else_than_memory_is_refused(fake: FakeLender, lender: LenderClient, answer: object) -> None:
    fake.answers["map"] = answer  # type: ignore[assignment]
    with pytest.raises((InvalidArgumentError, DeadlineError)):
        lender.map(DECLARED, 0.2)


def test_a_refused_layout_can_be_corrected(fake: FakeLender, lender: LenderClient) -> None:
    fake.answers["map"] = WrongStateError("LAYOUT_DIFFERS", "float16 is not float32", field="fingerprint.dtype")
    with pytest.raises(WrongStateError, match=r"fingerprint\.dtype: float16 is not float32"):
        lender.map(DECLARED, 10.0)
    del fake.answers["map"]
    run(lender.map(DECLARED, 10.0), 1)
    with pytest.raises(WrongStateError, match="has mapped the memory before"):
        lender.map(DECLARED, 10.0)


# Steps.


def test_rule_1_a_session_is_named_before_its_first_step_only(fake: FakeLender, memory: LentMemory) -> None:
    run(memory, 1, 1, 2, 1)
    binds = fake.wait_for("bind", 2)
    assert [bind.session_number for bind in binds] == [1, 2]  # type: ignore[attr-defined]
    assert fake.count("fenced") == 0


def test_rule_1_a_session_that_the_lender_refuses_runs_no_step(fake: FakeLender, memory: LentMemory) -> None:
    fake.answers["bind"] = AbortedError("SESSION_ENDED", "session 1 has ended")
    for _ in range(2):
        with pytest.raises(AbortedError, match="session 1 has ended"):
            memory.step(lease(1))
    del fake.answers["bind"]
    run(memory, 1)


def test_a_session_can_be_named_before_its_first_step(fake: FakeLender, memory: LentMemory) -> None:
    memory.bind(lease(1))
    run(memory, 1)
    assert fake.count("bind") == 1


def test_a_scheduler_names_its_session_without_mapping(fake: FakeLender, lender: LenderClient) -> None:
    lender.bind(lease(3))
    assert [bind.session_number for bind in fake.wait_for("bind")] == [3]  # type: ignore[attr-defined]


def test_rule_1_a_fence_that_was_sent_before_a_step_is_in_force(fake: FakeLender, memory: LentMemory) -> None:
    for sequence in range(1, 200):
        run(memory, sequence)
        fake.fence(sequence, last=sequence)
        assert refused(memory, lease(sequence)) == "SESSION_ENDED"


def test_rule_1_no_step_runs_between_epochs(fake: FakeLender, memory: LentMemory) -> None:
    run(memory, 1)
    fake.fence(1, last=0, epoch=0)
    assert refused(memory, lease(1)) == "NOT_READY"
    fake.fence(2, last=0, epoch=9)
    assert refused(memory, lease(1)) == "EPOCH_PASSED"
    with memory.step(lease(1, epoch=9)):
        pass
    assert [bind.epoch for bind in fake.wait_for("bind", 2)] == [7, 9]  # type: ignore[attr-defined]


def test_rule_2_a_fence_is_answered_while_the_engine_is_idle(fake: FakeLender, memory: LentMemory) -> None:
    run(memory, 1, 2)
    fake.fence(1, 2, last=2)
    assert [fenced.fence_sequence for fenced in fake.wait_for("fenced")] == [1]  # type: ignore[attr-defined]
    assert refused(memory, lease(1)) == "SESSION_ENDED"
    run(memory, 2, 3)


def test_rule_2_a_fence_is_answered_when_the_last_stale_step_is_done(fake: FakeLender, memory: LentMemory) -> None:
    stale, live = memory.step(lease(1)), memory.step(lease(2))
    fake.fence(1, 2, last=2)
    run(memory, 2)  # the fence is in force
    fake.fence(2, 2, last=2)
    run(memory, 2)
    assert fake.count("fenced") == 0
    stale.done()
    assert [fenced.fence_sequence for fenced in fake.wait_for("fenced")] == [2]  # type: ignore[attr-defined]
    live.done()
    assert fake.count("fenced") == 1


def test_rule_2_the_thread_waits_for_steps_on_a_device(fake: FakeLender, lender: LenderClient) -> None:
    tickets: list[StepTicket] = []
    memory = lender.map(DECLARED, 10.0, finish_steps=lambda: finish(tickets))
    tickets.append(memory.step(lease(1)))
    fake.fence(1, last=1)
    fake.wait_for("fenced")


def test_a_fence_may_come_in_pieces(fake: FakeLender, memory: LentMemory) -> None:
    run(memory, 1)
    fence = lending_pb2.LendFence(fence_sequence=1, epoch=7, last_session_number=1)
    content = lending_pb2.LendResponse(fence=fence).SerializeToString()
    data = len(content).to_bytes(4, "big") + content
    for i in range(len(data) - 1):
        fake.send(data[i : i + 1])
        run(memory, 1)
    fake.send(data[-1:])
    assert refused(memory, lease(1)) == "SESSION_ENDED"


def test_a_fence_may_come_before_the_answer_to_a_request(fake: FakeLender, memory: LentMemory) -> None:
    run(memory, 1)
    fence = lending_pb2.LendResponse(
        fence=lending_pb2.LendFence(fence_sequence=1, epoch=7, last_session_number=1)
    ).SerializeToString()
    fake.answers["bind"] = len(fence).to_bytes(4, "big") + fence + b"\x00\x00\x00\x02\x1a\x00"
    run(memory, 2)
    assert refused(memory, lease(1)) == "SESSION_ENDED"
    fake.wait_for("fenced")


def test_a_closed_memory_runs_no_step(fake: FakeLender, memory: LentMemory) -> None:
    run(memory, 1)
    memory.close()
    memory.close()
    fake.wait_for("unmap")
    assert refused(memory, lease(1)) == "CLOSED"
    with pytest.raises(StaleTablesError):
        memory.bind(lease(2))


def test_memory_is_not_given_back_while_a_step_is_in_flight(fake: FakeLender, memory: LentMemory) -> None:
    ticket = memory.step(lease(1))
    memory.close()
    fake.stop()
    ticket.done()
    assert fake.count("unmap") == 0


def test_memory_is_given_back_when_the_lender_is_there_again(fake: FakeLender, memory: LentMemory) -> None:
    run(memory, 1)
    fake.stop()
    memory.close()
    fake.start()
    fake.wait_for("unmap")
    client_ids = {hello.client_id for hello in fake.wait_for("hello", 2)}  # type: ignore[attr-defined]
    assert len(client_ids) == 1
    assert fake.count("map") == 1, "it maps nothing again"


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


def test_memory_is_given_back_after_the_steps_on_a_device(fake: FakeLender, lender: LenderClient) -> None:
    tickets: list[StepTicket] = []
    memory = lender.map(DECLARED, 10.0, finish_steps=lambda: finish(tickets))
    tickets.append(memory.step(lease(1)))
    memory.close()
    fake.wait_for("unmap")


# Memory that is unmapped for a while.


def reason_of(call: Callable[[], object]) -> str:
    with pytest.raises(KvpoolError) as caught:
        call()
    return caught.value.reason


def test_rule_6_no_step_runs_while_the_memory_is_unmapped(
    fake: FakeLender, memory: LentMemory, caplog: pytest.LogCaptureFixture
) -> None:
    fake.memory.write_bytes(b"\x05" * SIZE_BYTES)
    address, view = memory.buffer.data_ptr(), memory.buffer[8:16]
    run(memory, 1)
    for repeats in (1, 2):
        memory.unmap()
        memory.unmap()
        assert len(fake.wait_for("unmap")) == repeats
        assert reason_of(lambda: memory.step(lease(1))) == "UNMAPPED"
        assert reason_of(lambda: memory.step(lease(1, epoch=9))) == "UNMAPPED"
        memory.map_again()
        memory.map_again()
        assert fake.count("map") == 1 + repeats
        run(memory, 1, 1)
        assert fake.count("bind") == 1 + repeats, "the session is named again, as it may have ended"
        assert (memory.buffer.data_ptr(), view.tolist()) == (address, [5] * 8)
    assert "lender lost" not in caplog.messages


def test_rule_6_a_session_that_ended_meanwhile_runs_no_step(fake: FakeLender, memory: LentMemory) -> None:
    run(memory, 1, 2)
    memory.unmap()
    memory.map_again()
    fake.answers["bind"] = AbortedError("SESSION_ENDED", "it has ended")
    assert reason_of(lambda: memory.step(lease(1))) == "SESSION_ENDED"
    del fake.answers["bind"]
    run(memory, 2)


def test_rule_6_another_epoch_is_found_when_the_memory_is_mapped(fake: FakeLender, memory: LentMemory) -> None:
    run(memory, 1)
    memory.unmap()
    fake.epoch = 9
    memory.map_again()
    assert refused(memory, lease(1)) == "EPOCH_PASSED"
    with memory.step(lease(1, epoch=9)):
        pass


def test_memory_is_not_unmapped_while_a_step_is_in_flight(fake: FakeLender, memory: LentMemory) -> None:
    ticket = memory.step(lease(1))
    assert reason_of(memory.unmap) == "STEPS_IN_FLIGHT"
    run(memory, 1)
    memory.buffer[0] = 1
    ticket.done()
    memory.unmap()
    fake.wait_for("unmap")


def test_memory_is_unmapped_after_the_steps_on_a_device(fake: FakeLender, lender: LenderClient) -> None:
    tickets: list[StepTicket] = []
    memory = lender.map(DECLARED, 10.0, finish_steps=lambda: finish(tickets))
    tickets.append(memory.step(lease(1)))
    memory.unmap()
    fake.wait_for("unmap")


def test_rule_6_each_connection_reports_that_the_memory_is_unmapped(fake: FakeLender, memory: LentMemory) -> None:
    run(memory, 1)
    memory.unmap()
    for count in (2, 3):
        fake.disconnect()
        fake.wait_for("bind", count)
        kinds = [request.WhichOneof("message") for request in fake.requests]
        assert kinds[-3:] == ["hello", "unmap", "bind"], "the pool may wait until the process is known not to map"
    memory.map_again()
    run(memory, 1)
    fake.disconnect()
    fake.wait_for("bind", 5)
    assert (fake.count("unmap"), fake.count("map")) == (3, 3)


def test_memory_is_unmapped_and_mapped_without_the_lender(fake: FakeLender, memory: LentMemory) -> None:
    run(memory, 1)
    fake.stop()
    memory.unmap()
    assert reason_of(lambda: memory.step(lease(1))) == "UNMAPPED"
    fake.start()
    fake.wait_for("unmap")
    fake.stop()
    starting = threading.Timer(0.1, fake.start)
    starting.start()
    memory.map_again()
    starting.join()
    run(memory, 1)


def test_memory_stays_unmapped_if_the_lender_refuses_or_is_gone(fake: FakeLender) -> None:
    memory = connect_lender(fake.address, "m", timeout_seconds=0.2).map(DECLARED, 10.0)
    memory.unmap()
    fake.answers["map"] = WrongStateError("MEMORY_DIFFERS", "other processes use memory of another layout")
    assert reason_of(memory.map_again) == "MEMORY_DIFFERS"
    fake.stop()
    assert reason_of(memory.map_again) == "LENDER_GONE"
    assert reason_of(lambda: memory.step(lease(1))) == "UNMAPPED"
    fake.start()
    del fake.answers["map"]
    fake.wait_for("unmap", 2)
    memory.map_again()
    run(memory, 1)
    memory.close()


def test_memory_that_was_replaced_meanwhile_is_not_mapped(fake: FakeLender, memory: LentMemory) -> None:
    run(memory, 1)
    memory.unmap()
    replacement = fake.memory.with_name("other")
    replacement.write_bytes(b"\x00" * SIZE_BYTES)
    replacement.replace(fake.memory)
    for call in (memory.map_again, memory.map_again, memory.unmap, lambda: memory.step(lease(1))):
        assert reason_of(call) == "MEMORY_CHANGED"
    fake.wait_for("unmap", 2)


def test_memory_that_is_unmapped_while_the_thread_asks_for_it_stays_so(fake: FakeLender, memory: LentMemory) -> None:
    fake.answers["map"] = None
    fake.disconnect()
    fake.wait_for("map", 2)
    memory.unmap()
    assert fake.count("unmap") == 0, "there is no connection yet"
    del fake.answers["map"]
    fake.answer_last("map")
    fake.wait_for("unmap")
    assert fake.count("map") == 2
    assert reason_of(lambda: memory.step(lease(1))) == "UNMAPPED"


def test_a_closed_memory_is_neither_unmapped_nor_mapped(fake: FakeLender, memory: LentMemory) -> None:
    memory.unmap()
    memory.close()
    fake.wait_for("unmap", 2)
    for call in (memory.unmap, memory.map_again):
        assert reason_of(call) == "CLOSED"


# Broken connections.


def test_rule_3_steps_run_without_the_lender_and_sessions_are_named_again(fake: FakeLender, memory: LentMemory) -> None:
    run(memory, 1, 2)
    fake.stop()
    run(memory, 1, 2)
    fake.start()
    binds = fake.wait_for("bind", 4)
    assert {bind.session_number for bind in binds[2:]} == {1, 2}  # type: ignore[attr-defined]
    run(memory, 1, 2, 3)
    assert fake.count("map") == 2
    fake.fence(1, 2, last=2)
    fake.wait_for("fenced")
    assert refused(memory, lease(1)) == "SESSION_ENDED"


def test_rule_3_a_fence_that_came_before_the_end_stays_in_force(fake: FakeLender, memory: LentMemory) -> None:
    run(memory, 1)
    fake.fence(1, last=1)
    fake.stop()
    assert refused(memory, lease(1)) == "SESSION_ENDED"


def test_rule_3_a_new_session_waits_for_the_lender(fake: FakeLender, memory: LentMemory) -> None:
    fake.stop()
    thread = threading.Thread(target=run, args=(memory, 1))
    thread.start()
    fake.start()
    thread.join()
    assert fake.count("bind") == 1


def test_rule_3_a_session_that_is_refused_afterwards_runs_no_step(fake: FakeLender, memory: LentMemory) -> None:
    run(memory, 1, 2)
    fake.stop()
    fake.answers["bind"] = AbortedError("SESSION_ENDED", "it has ended")
    fake.start()
    fake.wait_for("bind", 4)
    with pytest.raises(AbortedError, match="it has ended"):
        run_forever(memory)  # until the connection is in use


def test_rule_3_a_fence_is_answered_on_the_newest_connection(fake: FakeLender, memory: LentMemory) -> None:
    ticket = memory.step(lease(1))
    fake.fence(5, last=1)
    fake.stop()
    fake.start()
    fake.wait_for("bind", 2)
    fake.fence(1, last=1)
    assert refused(memory, lease(1)) == "SESSION_ENDED"
    ticket.done()
    assert [fenced.fence_sequence for fenced in fake.wait_for("fenced")] == [1]  # type: ignore[attr-defined]


def test_rule_2_a_fence_that_comes_with_an_answer_is_answered_by_an_idle_process(
    fake: FakeLender, memory: LentMemory
) -> None:
    fence = lending_pb2.LendFence(fence_sequence=1, epoch=fake.epoch, last_session_number=1)
    bound = lending_pb2.LendResponse(bound=lending_pb2.Bound())
    run(memory, 1)
    fake.stop()
    fake.answers["bind"] = encode_message(lending_pb2.LendResponse(fence=fence)) + encode_message(bound)
    fake.start()
    fake.wait_for("fenced")
    assert refused(memory, lease(1)) == "SESSION_ENDED"


def test_rule_2_a_fence_is_answered_while_the_process_waits_for_its_memory_again(
    fake: FakeLender, memory: LentMemory
) -> None:
    stale = memory.step(lease(1))
    fake.stop()
    fake.answers["map"] = None
    fake.start()
    fake.wait_for("map", 2)
    fake.fence(1, last=0, epoch=0)  # the pool waits for the answer, and the memory for the pool
    assert fake.count("fenced") == 0
    stale.done()
    fake.wait_for("fenced")
    assert refused(memory, lease(1)) == "NOT_READY"
    fake.stop()
    fake.epoch = 9
    del fake.answers["map"]
    fake.start()
    fake.wait_for("map", 3)
    while True:
        with contextlib.suppress(StaleTablesError), memory.step(lease(1, epoch=9)):
            break


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 8,
        b"\x00\x00\x00\x03\xff\xff\xff",
        b"\x00\x00\x00\x02\x1a\x00",  # Bound
        b"\x00\x00\x00\x00",
        b"\x00\x00\x00\x02\x22\x00",  # a fence without a number
    ],
    ids=range(5),
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


def test_rule_4_other_memory_ends_all_steps(fake: FakeLender, memory: LentMemory) -> None:
    run(memory, 1)
    fake.stop()
    replacement = fake.memory.with_name("other")
    replacement.write_bytes(b"\x00" * SIZE_BYTES)
    replacement.replace(fake.memory)
    fake.start()
    with pytest.raises(StaleTablesError, match="the lender has other memory now") as caught:
        run_forever(memory)  # until the thread has looked
    assert caught.value.reason == "MEMORY_CHANGED"
    fake.wait_for("unmap")


def test_rule_4_steps_of_an_ended_epoch_use_the_old_memory_alone(fake: FakeLender, memory: LentMemory) -> None:
    """Lender, memory and epoch are replaced, and the thread has connected and learned nothing yet."""
    run(memory, 1)
    fake.stop()
    replacement = fake.memory.with_name("other")
    replacement.write_bytes(b"\x00" * SIZE_BYTES)
    replacement.replace(fake.memory)
    fake.epoch, fake.answers["hello"] = 8, None
    fake.start()
    fake.wait_for("hello", 2)
    with memory.step(lease(1)):
        memory.buffer.fill_(1)
    assert fake.memory.read_bytes() == b"\x00" * SIZE_BYTES
    del fake.answers["hello"]
    fake.answer_last("hello")
    with pytest.raises(StaleTablesError) as caught:
        memory.step(lease(2, epoch=8))  # waits for the thread
    assert caught.value.reason == "MEMORY_CHANGED"
    assert refused(memory, lease(1)) == "MEMORY_CHANGED"
    assert fake.memory.read_bytes() == b"\x00" * SIZE_BYTES


def test_rule_4_a_refusal_ends_all_steps(fake: FakeLender, memory: LentMemory) -> None:
    run(memory, 1)
    fake.stop()
    fake.answers["map"] = WrongStateError("LAYOUT_DIFFERS", "another engine laid it out")
    fake.start()
    with pytest.raises(StaleTablesError, match="another engine laid it out") as caught:
        run_forever(memory)  # until the thread has asked
    assert caught.value.reason == "LENDER_REFUSES"


def test_rule_2_an_error_of_the_device_does_not_end_the_thread(fake: FakeLender, lender: LenderClient) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error")

    memory = lender.map(DECLARED, 10.0, finish_steps=fail)
    ticket = memory.step(lease(1))
    fake.fence(1, last=1)
    assert refused(memory, lease(1)) == "SESSION_ENDED"
    ticket.done()
    fake.wait_for("fenced")
    memory.close()
    fake.wait_for("unmap")


def test_rule_3_a_session_is_named_again_when_the_lender_is_ready(fake: FakeLender, lender: LenderClient) -> None:
    """A scheduler maps nothing, so that it connects again before the pool is open."""
    lender.bind(lease(1))
    fake.stop()
    fake.answers["bind"] = AbortedError("NOT_READY", "no epoch is open")
    fake.start()
    fake.wait_for("bind", 2)
    del fake.answers["bind"]
    fake.wait_for("bind", 3)


def test_closing_does_not_wait_for_memory_that_is_asked_for_again(fake: FakeLender, memory: LentMemory) -> None:
    run(memory, 1)
    fake.stop()
    fake.answers["map"] = None
    fake.start()
    fake.wait_for("map", 2)
    memory.close()
    fake.wait_for("unmap")


def test_rule_5_a_lease_of_a_later_epoch_maps_the_memory_again(fake: FakeLender, memory: LentMemory) -> None:
    fake.epoch = 9  # nothing was sent: the process has named no session
    with memory.step(lease(1, epoch=9)):
        pass
    assert fake.count("map") == 2
    assert refused(memory, lease(1)) == "EPOCH_PASSED"
    assert refused(memory, lease(1, epoch=10)) == "EPOCH_PASSED", "the lender has another one"
    assert refused(memory, lease(2, epoch=10)) == "EPOCH_PASSED"
    assert fake.count("map") == 3, "once per epoch"
    run9 = lease(3, epoch=9)
    with memory.step(run9):
        pass


def test_rule_4_a_lender_that_is_not_ready_is_asked_again(fake: FakeLender, memory: LentMemory) -> None:
    run(memory, 1)
    fake.stop()
    fake.answers["map"] = UnavailableError("FORMING", "not all ranks are there", retry_seconds=0.1)
    fake.start()
    fake.wait_for("map", 3)
    run(memory, 1)
    del fake.answers["map"]
    fake.wait_for("bind", 2)


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
