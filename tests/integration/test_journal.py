"""A real server that is killed and restarted: schedulers, ranks and operators find their state again."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from kvpool.cli.pools import pools
from kvpool.client import NotFoundError, connect
from kvpool.client.admin import AdminClient
from kvpool.core.ranks.messages import HeldTensors
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, step_pb2
from kvpool.v1.pool_pb2 import PoolState
from kvpool.wire.errors import from_rpc_error
from support import processes
from support.core import block_hashes
from support.ranks import declared, declaring, registration
from support.server import CommandLineServer, ServerProcess, free_port, pool_config
from support.waiting import DEADLINE_SECONDS
from support.wire_ranks import WireRank
from support.workers import worker_processes


class Journaled:
    """A server with a journal that keeps its address over restarts."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.folder = folder / "journal"
        self.address = f"unix:{folder / 's'}"
        self._settings = settings
        self.start()

    def start(self, **settings: object) -> None:
        max_bytes = settings.pop("journal_max_bytes", 2**30)
        self._settings |= settings
        journal = {"folder": str(self.folder), "max_bytes": max_bytes}
        self.server = ServerProcess(self.address, journal=journal, retry_seconds=0.05, **self._settings)

    def restart(self, **settings: object) -> None:
        self.server.kill()
        self.start(**settings)


@pytest.fixture
def journaled(tmp_path: Path) -> Iterator[Journaled]:
    journaled = Journaled(tmp_path)
    yield journaled
    if journaled.server.is_alive:
        journaled.server.stop_cleanly()


class Scheduler:
    """Unary calls and single steps of one session on the wire, retried until they are answered."""

    def __init__(self, address: str, pool: str = "m", lease_seconds: float = 60.0) -> None:
        self.address = address
        with self.stub() as stub:
            opened = stub.OpenSession(allocator_pb2.OpenSessionRequest(pool_name=pool, lease_seconds=lease_seconds))
        self.session = opened.session
        self.sequence = 0

    @contextlib.contextmanager
    def stub(self) -> Iterator[Any]:
        with grpc.insecure_channel(self.address) as channel:
            yield allocator_pb2_grpc.AllocatorServiceStub(channel)

    def step(self, number: int, content: str, num_tokens: int) -> step_pb2.Step:
        self.sequence += 1
        return step_pb2.Step(
            session_id=self.session.session_id,
            sequence=self.sequence,
            executed_sequence=self.sequence - 1,
            operations=[step_pb2.OPERATION_ADMIT],
            request_numbers=[number],
            declares=[True],
            num_appended_tokens=[num_tokens],
            block_hashes=block_hashes(content, num_tokens // 4),
            request_ids=[f"r{number}"],
        )

    def send(self, *steps: step_pb2.Step) -> list[step_pb2.StepResult]:
        with self.stub() as stub:
            return [without_version(result) for result in stub.Schedule(iter(steps))]


def without_version(result: step_pb2.StepResult) -> step_pb2.StepResult:
    """The result of a step, without the version that only the first result of a stream has."""
    result.ClearField("protocol_version")
    return result


def info(address: str, pool: str = "m") -> Any:
    with grpc.insecure_channel(address) as channel:
        return (
            allocator_pb2_grpc.AllocatorServiceStub(channel).GetPool(allocator_pb2.GetPoolRequest(pool_name=pool)).pool
        )


def create(address: str, **options: Any) -> None:
    with connect(address) as client:
        client.create_pool(pool_config(**options))


def test_a_session_continues_and_a_lost_answer_is_repeated(journaled: Journaled) -> None:
    create(journaled.address)
    scheduler = Scheduler(journaled.address)
    first, second = scheduler.step(1, "abc", 14), scheduler.step(2, "abd", 14)
    answers = scheduler.send(first, second)
    before = info(journaled.address)
    journaled.restart()
    assert info(journaled.address) == before
    assert scheduler.send(second, first) == answers[::-1]
    third = scheduler.send(scheduler.step(3, "abcd", 18))[0]
    assert third.num_hit_tokens == [12]  # a prefix cached before the restart
    journaled.restart()
    assert scheduler.send(scheduler.step(4, "abcd", 18))[0].num_hit_tokens == [16]


def test_a_recovered_drain_can_be_undone_before_the_ranks_join(journaled: Journaled) -> None:
    WireRank(journaled.address).register(registration(0)).wait_for("registered")
    with AdminClient(journaled.address) as admin:
        admin.drain("m")
    journaled.restart()
    with AdminClient(journaled.address) as admin:
        assert admin.undrain("m") == ()
        with pytest.raises(NotFoundError):
            admin.undrain("m")
        rank = WireRank(journaled.address).register(registration(0))
        rank.wait_for("registered")
        assert [pool.state for pool in admin.overview().pools] == [PoolState.POOL_STATE_FORMING], "not drained"
        rank.cut()


def test_ranks_that_declared_their_memory_rejoin_and_others_do_not(journaled: Journaled) -> None:
    ranks = [WireRank(journaled.address).register(declaring(rank)) for rank in range(2)]
    for rank in ranks:
        rank.allocate()
    ready, _ = (rank.wait_for("ready").ready for rank in ranks)
    journaled.restart()
    held = HeldTensors(ready.epoch, ready.num_blocks)
    other = declaring(0, memory=declared(fingerprint=(("model", "other"),)), held=held)
    assert WireRank(journaled.address).register(other).wait_ended().reason == "RANKS_DISAGREE"
    back = [WireRank(journaled.address).register(declaring(rank, held=held)) for rank in range(2)]
    for rank in back:
        assert rank.wait_for("ready").ready == ready
        rank.cut()


def test_a_clean_stop_leaves_a_snapshot_and_no_changes(journaled: Journaled) -> None:
    create(journaled.address)
    scheduler = Scheduler(journaled.address)
    answers = scheduler.send(scheduler.step(1, "abc", 14))
    journaled.server.stop_cleanly()
    names = sorted(path.name.partition("-")[0] for path in journaled.folder.iterdir())
    assert names == ["lock", "log", "pools", "snapshot"]
    scheduler.sequence = 0
    journaled.start()
    assert scheduler.send(scheduler.step(1, "abc", 14)) == answers


def test_other_settings_do_not_change_the_recovered_state(journaled: Journaled) -> None:
    """Changes are replayed with their original effect, even if the new settings would change it."""
    create(journaled.address)
    requests = [
        allocator_pb2.OpenSessionRequest(pool_name="m", open_key="asked", lease_seconds=5.0, max_blocks=40),
        allocator_pb2.OpenSessionRequest(pool_name="m", open_key="default"),
    ]
    scheduler = Scheduler(journaled.address)
    answers = scheduler.send(scheduler.step(1, "abc", 14), scheduler.step(2, "abd", 14))
    with scheduler.stub() as stub:
        opened = [stub.OpenSession(request) for request in requests]
    before = info(journaled.address)
    journaled.restart(
        leases={"min_lease_seconds": 20.0, "default_lease_seconds": 30.0},
        limits={"max_sessions": 3, "max_session_blocks": 5, "max_step_operations": 1, "max_session_tokens": 1},
        metrics={"address": "127.0.0.1:0", "block_sample_rate": 1.0},
        max_pool_blocks=2,
        max_pools=1,
        past_epoch=10**6,
        quarantine_seconds=0.0,
    )
    assert info(journaled.address) == before
    scheduler.sequence = 0
    assert scheduler.send(scheduler.step(1, "abc", 14), scheduler.step(2, "abd", 14)) == answers
    with scheduler.stub() as stub:
        again = [stub.OpenSession(request) for request in requests]
        assert [(each.session, each.config) for each in again] == [(each.session, each.config) for each in opened]
        for answer in opened:
            request = allocator_pb2.KeepAliveRequest(session_id=answer.session.session_id)
            assert stub.KeepAlive(request).lease_seconds == answer.session.lease_seconds
        stub.CloseSession(allocator_pb2.CloseSessionRequest(session_id=opened[0].session.session_id))
        fresh = stub.OpenSession(allocator_pb2.OpenSessionRequest(pool_name="m"))
    assert [each.session.lease_seconds for each in (*opened, fresh)] == [5.0, 60.0, 30.0]
    after = info(journaled.address)
    journaled.restart(leases={}, limits={}, metrics={})
    assert info(journaled.address) == after


def test_two_servers_do_not_share_a_journal(journaled: Journaled, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="another server uses the journal in"):
        CommandLineServer(f"unix:{tmp_path / 'other'}", options=("--journal", journaled.folder))


@pytest.mark.parametrize("damage", ["flip", "boot"])
def test_an_invalid_journal_is_dropped(journaled: Journaled, damage: str) -> None:
    create(journaled.address)
    scheduler = Scheduler(journaled.address)
    scheduler.send(scheduler.step(1, "abc", 14))
    before = info(journaled.address)
    journaled.server.kill()
    log = next(journaled.folder.glob("log-*"))
    content = bytearray(log.read_bytes())
    if damage == "flip":
        content[-5] ^= 1
        log.write_bytes(content)
    else:
        log.with_name("snapshot-9").write_bytes(b"kvpool1\n")
    journaled.start(quarantine_seconds=300.0)
    after = info(journaled.address)
    assert after.epoch > before.epoch
    assert (after.cached_blocks, after.sessions, after.config) == (0, 0, before.config)
    with pytest.raises(grpc.RpcError) as caught:
        scheduler.send(scheduler.step(2, "abc", 14))
    assert from_rpc_error(caught.value).reason == "JOURNAL_DROPPED"
    outputs = []
    for _ in range(2):  # the new journal has it, too
        with pytest.raises(grpc.RpcError) as caught:
            Scheduler(journaled.address)
        error = from_rpc_error(caught.value)
        assert (error.reason, error.field) == ("SESSIONS_LOST", "pool_name")
        assert 0 < (error.retry_seconds or 0) <= 300
        assert info(journaled.address) == after
        outputs.append(journaled.server.stop_cleanly())
        journaled.start()
    journaled.restart(quarantine_seconds=0.0)
    fresh = Scheduler(journaled.address)
    assert fresh.send(fresh.step(1, "abc", 14))[0].num_hit_tokens == []
    assert ["journal dropped" in each for each in outputs] == [True, False]


def test_a_full_disk_costs_the_journal_and_no_answer(journaled: Journaled) -> None:
    """The process may write files of up to 20,000 bytes: the first log exceeds this, a new journal does not."""
    create(journaled.address)
    scheduler = Scheduler(journaled.address)
    limit = ["prlimit", f"--pid={journaled.server.pid}"]
    processes.run([*limit, "--fsize=20000"], check=True)
    for i in range(1, 60):
        scheduler.send(scheduler.step(i, f"{i:03}" * 10, 4 * 24))
        free = step_pb2.Step(
            session_id=scheduler.session.session_id,
            sequence=scheduler.sequence + 1,
            operations=[step_pb2.OPERATION_FREE],
            request_numbers=[i],
        )
        scheduler.sequence += 1
        scheduler.send(free)
    before = info(journaled.address)
    journaled.server.kill()
    assert "journal given up" in journaled.server.log
    journaled.start()
    after = info(journaled.address)
    assert (after.epoch == before.epoch) or after.epoch > before.epoch + 900
    if after.epoch == before.epoch:
        assert after == before


def test_a_server_whose_snapshot_does_not_fit_serves_and_states_it(journaled: Journaled) -> None:
    for name in ("m", *(f"pool-{i}" for i in range(20))):
        create(journaled.address, name=name, num_blocks=20_000)
    journaled.server.kill()
    next(journaled.folder.glob("snapshot-*")).unlink()
    for _ in range(2):
        journaled.start(journal_max_bytes=2**20, quarantine_seconds=0.0)
        with AdminClient(journaled.address) as admin:
            assert admin.overview().server.journal_error.endswith("_FAILED: journal_max_bytes is reached")
        listed = CliRunner().invoke(pools, ["--address", journaled.address])
        assert listed.stderr.startswith("the journal is down: "), "the reason changes after five seconds"
        assert listed.stderr.endswith("_FAILED: journal_max_bytes is reached\n")
        assert Scheduler(journaled.address).send() == []
        assert "journal given up" in journaled.server.stop_cleanly(expected=["journal given up"])
    journaled.start()
    with AdminClient(journaled.address) as admin:
        assert admin.overview().server.journal_error == ""


def test_ranks_form_no_pool_whose_snapshot_does_not_fit(journaled: Journaled) -> None:
    journaled.restart(journal_max_bytes=2**20)
    rank = WireRank(journaled.address).register(registration(0, 1, blocks=30_000))
    error = rank.wait_ended()
    assert (error.reason, error.field) == ("TOO_MANY_BLOCKS", "options.num_blocks_override")
    assert "takes 1500000 bytes, journal_max_bytes is 1048576" in str(error)
    rank = WireRank(journaled.address).register(registration(0, 1, blocks=20_000))
    rank.allocate().wait_for("ready")
    rank.cut()


def test_real_workers_keep_their_tensors_while_a_server_restarts(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with (
        ServerProcess(address, journal={"folder": str(tmp_path / "journal")}) as server,
        worker_processes(tmp_path) as workers,
    ):
        ranks = workers.form(address, 2)
        server.restart()
        with connect(address) as client:
            assert client.wait_until_ready("m", timeout_seconds=DEADLINE_SECONDS).state == PoolState.POOL_STATE_READY
            assert client.get_pool("m").epoch == 1
        for rank in ranks:
            assert not [line for line in rank.lines if "epoch passed" in line]
            assert len([line for line in rank.lines if "rank allocating" in line]) == 1
