"""Schedulers reach the ranks by a socket: in order, each with its own session, and only with the key."""

import contextlib
import queue
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import AuthenticationError
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from examples.reference_engine.step import RequestStep, StepInput
from examples.reference_engine.step_link import StepLink, StepRefusedError
from examples.reference_engine.step_server import StepServer
from kvpool.client import FullAttentionSpec, KVCacheGroup, PoolConfig, Session, connect
from kvpool.core.errors import AbortedError
from kvpool.core.ids import PoolName, SessionNumber, TableLease
from kvpool.replay.executor import Scheduled
from support.waiting import DEADLINE_SECONDS

KEY = b"key"
LEASE = TableLease(1, SessionNumber(1))


class Ranks:
    """Answers each step with the number of steps before it, and refuses those of other epochs."""

    def __init__(self) -> None:
        self.steps: list[StepInput] = []
        self.ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    def execute(self, step: StepInput) -> list[int]:
        if step.lease.epoch != 1:
            raise AbortedError("EPOCH_PASSED", "another epoch")
        self.steps.append(step)
        return [len(self.steps)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:  # a unix socket's path must be short
        yield Path(name)


@contextlib.contextmanager
def listening(path: Path) -> Iterator[Ranks]:
    ranks, server = Ranks(), StepServer(path, KEY)
    thread = threading.Thread(target=server.serve, args=(ranks.execute, ranks.ended.put))
    thread.start()
    try:
        yield ranks
    finally:
        server.stop()
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()


@pytest.fixture
def session() -> Iterator[Session]:
    with connect("embedded:") as client:
        client.create_pool(PoolConfig(PoolName("p"), 20, 64, (KVCacheGroup(FullAttentionSpec(4)),)))
        with client.open_session("p") as session:
            yield session


def test_only_new_tokens_and_blocks_are_sent(folder: Path, session: Session) -> None:
    request = session.request("r", [1, 2, 3, 4, 5])
    with listening(folder / "s") as ranks:
        link = StepLink(folder / "s", KEY, LEASE)
        admission = session.admit(request, 3)
        assert admission
        entry = Scheduled(request)
        assert link.execute([entry], []) == [1]
        entry.num_executed_tokens = 3
        assert link.execute([entry], []) == []  # no room was made: nothing is sent
        allocation = session.allocate_slots(request, 2)
        assert allocation
        link.execute([entry], [])
        session.preempt(request)
        link.execute([], [request])
        session.admit(request)
        entry.num_executed_tokens = 4  # its own block is hit
        link.execute([entry], [])
        first, second, third, fourth = ranks.steps
        link.close()
        assert ranks.ended.get(timeout=DEADLINE_SECONDS) == first.session
    block, next_block = request.block_ids[0]
    assert first.requests == [RequestStep("r", True, 0, 3, [1, 2, 3, 4, 5], [[block]])]  # noqa: FBT003 - a field
    assert second.requests == [RequestStep("r", False, 3, 2, [], allocation.new_blocks)]  # type: ignore[union-attr]  # noqa: FBT003
    assert (third.requests, third.released) == ([], ["r"])
    assert fourth.requests == [RequestStep("r", True, 4, 1, [1, 2, 3, 4, 5], [[block, next_block]])]  # noqa: FBT003


def test_a_refusal_names_its_reason(folder: Path, session: Session) -> None:
    request = session.request("r", [1, 2, 3])
    session.admit(request)
    with listening(folder / "s") as ranks:
        link = StepLink(folder / "s", KEY, replace(LEASE, epoch=2))
        with pytest.raises(StepRefusedError, match="another epoch") as caught:
            link.execute([Scheduled(request)], [])
        link.close()
    assert caught.value.reason == "EPOCH_PASSED"
    assert not ranks.steps


def test_clients_without_the_authkey_are_refused(folder: Path, session: Session) -> None:
    request = session.request("r", [1, 2, 3])
    session.admit(request)
    with listening(folder / "s"):
        assert stat.S_IMODE((folder / "s").stat().st_mode) == 0o600
        with pytest.raises(AuthenticationError):
            StepLink(folder / "s", b"guess", LEASE)
        link = StepLink(folder / "s", KEY, LEASE)  # others are served on
        assert link.execute([Scheduled(request)], []) == [1]
        link.close()


def test_each_scheduler_has_its_session(folder: Path, session: Session) -> None:
    request = session.request("r", [1, 2, 3])
    session.admit(request)
    with listening(folder / "s") as ranks:
        links = [StepLink(folder / "s", KEY, LEASE) for _ in range(3)]
        tokens = [link.execute([Scheduled(request)], []) for link in links]
        for link in links:
            link.close()
        ended = {ranks.ended.get(timeout=DEADLINE_SECONDS) for _ in links}
    assert tokens == [[1], [2], [3]]
    assert ended == {step.session for step in ranks.steps}
    assert len(ended) == 3
