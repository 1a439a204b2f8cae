"""Resumption on ranks that fence: answered when no step of the previous process can touch the blocks."""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import pytest

from kvpool.client import AbortedError, Client, KvpoolError, Session, UnavailableError, connect
from kvpool.client.admin import AdminClient
from kvpool.core.ids import SessionNumber, TableLease
from kvpool.core.ranks.messages import HeldTensors
from kvpool.lending.fence import Fence, StaleTablesError
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, worker_pb2
from kvpool.wire.errors import from_rpc_error
from support.ranks import registration
from support.server import ServerProcess, running_server, server_process
from support.waiting import DEADLINE_SECONDS, wait_until
from support.wire_ranks import WireRank, form, keep

PROMPT = list(range(100))
SHORT_SECONDS = 1.0
TIMING = {"heartbeat_seconds": 1.0, "heartbeat_timeout_seconds": 60.0, "grace_seconds": 60.0}


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with server_process(rank_timing=TIMING, quarantine_seconds=600.0) as server:
        yield server


@pytest.fixture
def address(server: ServerProcess) -> str:
    return server.addresses[0]


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with connect(address) as client:
        yield client


def fill(client: Client, lease_seconds: float = 60.0) -> Session:
    session = client.open_session("m", lease_seconds=lease_seconds)
    assert session.admit(session.request("r", PROMPT))
    return session


def resuming(stub: allocator_pb2_grpc.AllocatorServiceStub, session: Session, key: str = "k") -> Any:
    """Starts a resumption, which may take long."""
    request = allocator_pb2.ResumeSessionRequest(session_id=session.session_id, resume_key=key)
    return stub.ResumeSession.future(request)


def fence_of(rank: WireRank, last: int, after: int = 0) -> worker_pb2.Fence:
    """Waits for a fence with this last session number and a sequence above `after`."""
    found = rank.wait_for("fence", lambda m: m.fence.last_session_number == last and m.fence.fence_sequence > after)
    return found.fence


def refusal(call: Any) -> KvpoolError:
    with pytest.raises(grpc.RpcError) as caught:
        call.result(timeout=DEADLINE_SECONDS)
    return from_rpc_error(caught.value)


def listened(rank: WireRank) -> None:
    """Waits until the server has handled all messages of a rank."""
    rank.beat(77).wait_for("status", lambda m: m.status.heartbeat_sequence == 77)


def test_a_resumption_is_answered_after_every_rank_fenced(
    server: ServerProcess, client: Client, stub: allocator_pb2_grpc.AllocatorServiceStub
) -> None:
    ranks = form(server.addresses[0], 2, 2)
    before = fill(client)
    gpu = Fence()
    gpu.begin(before.epoch)
    gpu.open(before.epoch)
    step = gpu.step(before.table_lease)
    call = resuming(stub, before)
    fences = [fence_of(rank, 2) for rank in ranks]
    assert [list(fence.live_session_numbers) for fence in fences] == [[2], [2]]
    gpu.narrow(fences[0].last_session_number, fences[0].live_session_numbers)
    assert not gpu.is_drained
    keep(ranks[0], fences[0])
    listened(ranks[0])
    assert not call.done()
    step.done()
    assert gpu.is_drained
    keep(ranks[1], fences[1])
    resumed = call.result(timeout=DEADLINE_SECONDS)
    assert (resumed.session.session_number, resumed.session.epoch) == (2, before.epoch)
    with pytest.raises(StaleTablesError) as caught:
        gpu.step(before.table_lease)
    assert caught.value.reason == "SESSION_ENDED"
    gpu.step(TableLease(resumed.session.epoch, SessionNumber(resumed.session.session_number))).done()
    assert client.get_pool("m").quarantined_blocks == 0


def test_a_resumption_can_be_repeated_and_waits_again(
    server: ServerProcess, client: Client, stub: allocator_pb2_grpc.AllocatorServiceStub
) -> None:
    (rank,) = form(server.addresses[0], 1, 1)
    before = fill(client)
    first = resuming(stub, before)
    fence = fence_of(rank, 2)
    first.cancel()
    again = resuming(stub, before)
    later = fence_of(rank, 2, after=fence.fence_sequence)
    keep(rank, later)
    resumed = again.result(timeout=DEADLINE_SECONDS)
    assert resumed.session.session_number == 2
    late = resuming(stub, before)  # a request after completion gets the same answer and has no effect
    keep(rank, fence_of(rank, 2, after=later.fence_sequence))
    assert late.result(timeout=DEADLINE_SECONDS) == resumed


def test_the_lease_does_not_expire_while_waiting(
    server: ServerProcess, client: Client, stub: allocator_pb2_grpc.AllocatorServiceStub
) -> None:
    (rank,) = form(server.addresses[0], 1, 1)
    call = resuming(stub, fill(client, SHORT_SECONDS))
    fence = fence_of(rank, 2)
    with pytest.raises(grpc.FutureTimeoutError):
        call.result(timeout=2 * SHORT_SECONDS)
    keep(rank, fence)
    assert call.result(timeout=DEADLINE_SECONDS).session.session_number == 2


def evict(address: str) -> None:
    with AdminClient(address) as admin:
        admin.evict_session("m", next(iter(admin.sessions("m"))).session_number)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (lambda server, _: evict(server.addresses[0]), (AbortedError, "SESSION_EVICTED")),
        (lambda _, rank: rank.say(leave=worker_pb2.Leave()), (AbortedError, "EPOCH_PASSED")),
        (lambda server, _: server.signal(signal.SIGTERM), (UnavailableError, "DRAINING")),
    ],
    ids=["evicted", "epoch", "stopped"],
)
def test_the_end_of_the_session_ends_the_wait(
    end: Callable[[ServerProcess, WireRank], object],
    expected: tuple[type[KvpoolError], str],
    server: ServerProcess,
    client: Client,
    stub: allocator_pb2_grpc.AllocatorServiceStub,
) -> None:
    (rank,) = form(server.addresses[0], 1, 1)
    call = resuming(stub, fill(client))
    fence_of(rank, 2)
    end(server, rank)
    error = refusal(call)
    assert (type(error), error.reason) == expected


def test_a_second_resumption_ends_the_wait_of_the_first(
    server: ServerProcess, client: Client, stub: allocator_pb2_grpc.AllocatorServiceStub
) -> None:
    (rank,) = form(server.addresses[0], 1, 1)
    before = fill(client)
    first = resuming(stub, before, "a")
    fence_of(rank, 2)
    second = resuming(stub, before, "b")
    assert refusal(first).reason == "SESSION_RESUMED"
    fence = fence_of(rank, 3)
    assert list(fence.live_session_numbers) == [3]
    keep(rank, fence)
    assert second.result(timeout=DEADLINE_SECONDS).session.session_number == 3


def test_ranks_are_not_waited_for_if_one_does_not_fence() -> None:
    with running_server(rank_timing=TIMING) as address, connect(address) as client:
        fencing, _ = form(address, 2, 1)
        before = fill(client)
        after = client.resume_session(before.session_id)
        assert (after.session_number, after.table_lease) == (2, TableLease(before.epoch, SessionNumber(2)))
        assert list(fence_of(fencing, 2).live_session_numbers) == [2]
        after.close()


def test_a_server_killed_meanwhile_waits_for_its_ranks_again(tmp_path: Path) -> None:
    with TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"journal": {"folder": str(tmp_path)}, "rank_timing": TIMING}
        address = f"unix:{folder}/s"
        with (
            ServerProcess(address, **settings) as server,
            connect(address, deadline_seconds=DEADLINE_SECONDS) as client,
            ThreadPoolExecutor(1) as pool,
        ):
            (rank,) = form(address, 1, 1)
            before = fill(client)
            call = pool.submit(client.resume_session, before.session_id, sequence=before.sequence)
            fence_of(rank, 2)
            server.restart()
            back = WireRank(address)
            tensors = HeldTensors(1, client.get_pool("m").config.num_blocks)
            back.register(registration(0, 1, held=tensors, fences=True)).wait_for("ready")
            assert list(fence_of(back, 2).live_session_numbers) == [2]
            listened(back)
            assert not call.done()

            def keeps_all() -> bool:  # the retried call requests another fence
                keep(back, back.wait_for("fence").fence)
                return call.done()

            wait_until(keeps_all, "it is answered")
            after = call.result(timeout=DEADLINE_SECONDS)
            assert (after.session_number, len(after.held_requests)) == (2, 1)
            after.close()
