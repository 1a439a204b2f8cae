"""Tests of lending/borrower_registry.py; they cite its rules."""

import errno
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvpool.core.errors import ExhaustedError, InvalidArgumentError, UnavailableError
from kvpool.core.ids import SessionNumber, TableLease
from kvpool.core.ranks.messages import MAX_MAPPING_PROCESSES, MappingProcess
from kvpool.lending.borrower_registry import (
    MAX_CONNECTIONS,
    MAX_SESSIONS,
    MAX_USES,
    Borrower,
    BorrowerRegistry,
    FenceSent,
    Link,
)
from kvpool.lending.fence import StaleTablesError
from kvpool.lending.memory_folder import PastBorrower

ONE, TWO = (TableLease(5, SessionNumber(number)) for number in (1, 2))


class World:
    """Two processes that map the memory in epoch 5, and what they were sent."""

    def __init__(self) -> None:
        self.saved: list[PastBorrower] = []
        self.num_ends = 0
        self.disk_is_full = False
        self.killed: list[int] = []
        self.num_lists = 0
        self.is_list_torn = False
        self.borrowers = BorrowerRegistry(self._save, self._add, self._kill).attach(self._count)
        self.sent: dict[Borrower, list[FenceSent]] = {}
        self.borrowers.begin(5)
        self.borrowers.open(5)
        self.first, self.second = self.mapping(1), self.mapping(2)

    def connected(self, pid: int, name: str = "engine") -> Borrower:
        """A process with a new connection."""
        sent: list[FenceSent] = []
        borrower = self.borrowers.connect(pid, 100, "id", name, Link(sent.append))
        self.sent[borrower] = sent
        return borrower

    def mapping(self, pid: int) -> Borrower:
        borrower = self.connected(pid)
        self.map(borrower)
        return borrower

    def map(self, borrower: Borrower, epoch: int = 5) -> None:
        self.borrowers.map(borrower, link(borrower), epoch, lambda: None)

    def bind(self, borrower: Borrower, lease: TableLease) -> None:
        self.borrowers.bind(borrower, link(borrower), lease)

    def answered(self, borrower: Borrower, fence_sequence: int) -> None:
        self.borrowers.fence_answered(borrower, link(borrower), fence_sequence)

    def _save(self, borrowers: list[PastBorrower]) -> None:
        if self.disk_is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.saved = borrowers
        self.num_lists += 1

    def _add(self, borrower: PastBorrower) -> None:
        if self.disk_is_full or self.is_list_torn:
            raise OSError(errno.ENOSPC, "No space left on device")
        (place,) = (i for i, each in enumerate(self.saved) if each.pid == borrower.pid)
        self.saved[place] = replace(self.saved[place], sessions=self.saved[place].sessions + borrower.sessions)

    def _kill(self, borrower: Borrower) -> None:
        self.killed.append(borrower.pid)

    def _count(self) -> None:
        self.num_ends += 1


def link(borrower: Borrower) -> Link:
    assert borrower.link
    return borrower.link


@pytest.fixture
def world() -> World:
    return World()


def test_rule_1_a_session_that_has_ended_or_of_another_epoch_cannot_be_named(world: World) -> None:
    world.borrowers.narrow(1, ())
    for lease, reason in ((ONE, "SESSION_ENDED"), (TableLease(4, SessionNumber(9)), "EPOCH_PASSED")):
        with pytest.raises(StaleTablesError) as caught:
            world.bind(world.first, lease)
        assert caught.value.reason == reason
    assert not world.first.leases
    world.bind(world.first, TWO)


def test_rule_2_an_ended_session_is_pending_until_its_process_answers(world: World) -> None:
    world.bind(world.first, ONE)
    world.bind(world.second, TWO)
    world.borrowers.narrow(2, (2,))
    assert world.sent == {world.first: [FenceSent(1, 5, 2, (2,))], world.second: []}
    assert (world.borrowers.pending, world.borrowers.is_drained) == ((1,), False)
    world.answered(world.first, 1)
    assert world.borrowers.is_drained
    assert world.num_ends == 1


def test_rule_2_the_exit_of_a_process_answers_for_it_and_names_its_live_sessions(world: World) -> None:
    world.bind(world.first, ONE)
    world.bind(world.first, TWO)
    world.borrowers.narrow(1, ())
    assert world.borrowers.pending == (1,)
    assert world.borrowers.remove_exited(world.first) == (TWO,), "the other one has ended"
    assert world.borrowers.is_drained
    assert world.num_ends == 1
    assert [each.pid for each in world.saved] == [2]


def test_rule_2_a_process_that_gives_the_memory_back_is_not_waited_for(world: World) -> None:
    world.bind(world.first, ONE)
    world.borrowers.narrow(1, ())
    world.borrowers.unmap(world.first, link(world.first))
    assert (world.borrowers.is_drained, world.borrowers.num_mapping) == (True, 1)


def test_rule_6_a_process_that_unmaps_the_memory_keeps_its_open_sessions(world: World) -> None:
    for lease in (ONE, TWO):
        world.bind(world.first, lease)
    world.borrowers.narrow(2, (2,))
    world.borrowers.unmap(world.first, link(world.first))
    assert not world.borrowers.pending
    assert world.first.leases == {TWO}
    assert [each.pid for each in world.saved] == [2]
    world.borrowers.narrow(3, ())
    assert world.borrowers.is_drained, "it answers at once"
    assert len(world.sent[world.first]) == 1, "it is sent no fence"
    with pytest.raises(StaleTablesError):
        world.bind(world.first, TWO)
    world.map(world.first)
    world.bind(world.first, TableLease(5, SessionNumber(4)))
    world.borrowers.narrow(4, ())
    assert world.borrowers.pending == (4,)
    assert world.sent[world.first][1:] == [FenceSent(2, 5, 4, ())]


def test_rule_6_the_exit_of_a_process_that_has_unmapped_the_memory_ends_its_sessions(world: World) -> None:
    world.bind(world.first, ONE)
    world.borrowers.unmap(world.first, link(world.first))
    assert world.borrowers.remove_exited(world.first) == (ONE,)


def test_rule_6_memory_is_in_use_while_a_process_may_map_it_again(world: World) -> None:
    world.bind(world.first, ONE)
    for borrower in (world.first, world.second):
        world.borrowers.unmap(borrower, link(borrower))
    assert (world.borrowers.is_in_use, world.borrowers.num_mapping) == (True, 0)
    world.borrowers.narrow(1, ())
    assert not world.borrowers.is_in_use, "its session has ended"
    world.bind(world.second, TWO)
    assert world.borrowers.is_in_use
    world.borrowers.disconnect(world.second, link(world.second))
    assert not world.borrowers.is_in_use


def test_rule_2_a_process_that_maps_nothing_is_not_waited_for(world: World) -> None:
    scheduler = world.connected(3, "scheduler")
    world.bind(scheduler, ONE)
    world.borrowers.narrow(1, ())
    assert world.borrowers.is_drained
    assert world.borrowers.remove_exited(scheduler) == ()


def test_rule_5_a_process_may_not_write_what_cannot_be_written_down(world: World) -> None:
    world.disk_is_full = True
    third = world.connected(3)
    with pytest.raises(UnavailableError) as caught:
        world.map(third)
    assert caught.value.reason == "NOT_WRITTEN"
    assert (third.maps, link(third).maps, world.borrowers.num_mapping) == (False, False, 2)
    with pytest.raises(UnavailableError):
        world.bind(world.first, ONE)
    assert not world.first.leases


def test_rule_5_an_exit_counts_although_it_cannot_be_written_down(world: World) -> None:
    world.bind(world.first, ONE)
    world.disk_is_full = True
    assert world.borrowers.remove_exited(world.first) == (ONE,)
    assert [each.pid for each in world.saved] == [1, 2]


def sessions_of(world: World, pid: int) -> list[int]:
    return [number for each in world.saved if each.pid == pid for _, number in each.sessions]


def test_rule_5_a_session_is_added_to_the_list_and_does_not_write_it_again(world: World) -> None:
    before = world.num_lists
    for number in range(1, 101):
        world.bind(world.first, TableLease(5, SessionNumber(number)))
    assert world.num_lists == before
    assert sessions_of(world, 1) == list(range(1, 101))
    assert sessions_of(world, 2) == []


def test_rule_5_a_session_of_a_process_that_maps_nothing_yet_is_persisted_with_its_map(world: World) -> None:
    third = world.connected(3)
    world.bind(third, ONE)
    assert sessions_of(world, 3) == []
    world.map(third)
    assert sessions_of(world, 3) == [1]


def test_rule_5_a_list_that_cannot_be_added_to_is_written_again(world: World) -> None:
    world.bind(world.first, ONE)
    world.is_list_torn, world.saved = True, []
    world.bind(world.first, TWO)
    assert sessions_of(world, 1) == [1, 2]


def test_rule_5_ended_sessions_leave_the_list_once_they_are_half_of_it(world: World) -> None:
    num_sessions = 64
    for number in range(1, num_sessions + 1):
        world.bind(world.first, TableLease(5, SessionNumber(number)))
    before = world.num_lists
    for number in range(1, num_sessions + 1):
        world.borrowers.narrow(number, ())
        world.answered(world.first, number)
        num_open = num_sessions - number
        assert set(range(number + 1, num_sessions + 1)) <= set(sessions_of(world, 1))
        assert len(sessions_of(world, 1)) <= max(2 * num_open, 1)
    assert sessions_of(world, 1) == []
    assert world.num_lists - before <= 8


def test_the_exit_of_a_scheduler_names_its_session(world: World) -> None:
    scheduler = world.connected(3, "scheduler")
    world.bind(scheduler, ONE)
    assert world.borrowers.remove_exited(scheduler) == (ONE,)


def test_rule_3_a_process_without_a_connection_is_waited_for(world: World) -> None:
    world.bind(world.first, ONE)
    earlier = link(world.first)
    assert world.borrowers.disconnect(world.first, earlier) == []
    world.borrowers.narrow(1, ())
    assert (world.borrowers.pending, world.sent[world.first]) == ((1,), [])
    assert world.connected(1) is world.first
    assert world.sent[world.first] == [], "it has not asked for the memory"
    world.borrowers.resend_fence(world.first, link(world.first))
    assert world.sent[world.first] == [FenceSent(1, 5, 1, ())], "rule 4"
    world.borrowers.disconnect(world.first, earlier)
    assert world.first.link, "an earlier connection ends late"
    world.answered(world.first, 1)
    assert world.borrowers.is_drained


def test_rule_4_a_process_that_maps_learns_of_the_end_of_an_epoch_while_it_waits_for_the_next(world: World) -> None:
    world.bind(world.first, ONE)
    world.borrowers.disconnect(world.first, link(world.first))
    world.borrowers.end()
    world.connected(1)
    world.borrowers.resend_fence(world.first, link(world.first))
    world.answered(world.first, 1)
    assert world.borrowers.is_drained, "so that the rank can answer a plan"
    with pytest.raises(StaleTablesError):
        world.map(world.first)
    world.borrowers.begin(6)
    world.map(world.first, 6)
    assert [fence.epoch for fence in world.sent[world.first]] == [0]


def test_rule_4_an_answer_on_an_earlier_connection_does_not_count(world: World) -> None:
    world.bind(world.first, ONE)
    world.borrowers.narrow(1, ())
    earlier = link(world.first)
    world.connected(1)
    world.borrowers.resend_fence(world.first, link(world.first))
    world.borrowers.fence_answered(world.first, earlier, 1)
    assert world.borrowers.pending == (1,)
    world.borrowers.unmap(world.first, earlier)
    assert world.borrowers.pending == (1,)


@pytest.mark.parametrize("sequence", [0, 2])
def test_rule_4_an_answer_to_a_fence_that_was_not_sent_is_refused(world: World, sequence: int) -> None:
    world.bind(world.first, ONE)
    world.borrowers.narrow(1, ())
    with pytest.raises(InvalidArgumentError, match="was not sent; the newest fence is 1") as caught:
        world.answered(world.first, sequence)
    assert caught.value.field == "fenced.fence_sequence"
    assert world.borrowers.pending == (1,)


def test_rule_6_a_process_that_maps_nothing_is_forgotten_with_its_last_session(world: World) -> None:
    scheduler, idle = world.connected(3, "scheduler"), world.connected(4)
    world.bind(scheduler, ONE)
    assert world.borrowers.disconnect(scheduler, link(scheduler)) == []
    assert world.borrowers.disconnect(world.first, link(world.first)) == []
    world.borrowers.narrow(1, ())
    assert set(world.borrowers.disconnect(idle, link(idle))) == {scheduler, idle}
    assert world.borrowers.all() == [world.first, world.second]


def test_rule_7_a_process_that_is_gone_maps_nothing_and_names_no_session(world: World) -> None:
    gone, forgotten, earlier = world.connected(3), world.connected(4), link(world.first)
    links = {gone: link(gone), forgotten: link(forgotten), world.first: earlier}
    world.borrowers.remove_exited(gone)
    world.borrowers.disconnect(forgotten, links[forgotten])
    world.connected(1)
    saved = world.saved
    for process, link_before in links.items():
        with pytest.raises(UnavailableError) as caught:
            world.borrowers.map(process, link_before, 5, lambda: pytest.fail("the memory was sent"))
        assert caught.value.reason == "CONNECTION_REPLACED"
        with pytest.raises(UnavailableError):
            world.borrowers.bind(process, link_before, ONE)
        assert not process.leases
    assert (world.saved, world.borrowers.all()) == (saved, [world.first, world.second])


@pytest.mark.parametrize("pids", [[3] * MAX_USES, range(3, MAX_CONNECTIONS + 1)], ids=["process", "lender"])
def test_rule_8_connections_are_limited_and_a_known_one_may_be_replaced(world: World, pids: Sequence[int]) -> None:
    for i, pid in enumerate(pids):
        last = world.borrowers.connect(pid, 100, f"use-{i}", "engine", Link(lambda _: None))
    before = world.borrowers.all()
    with pytest.raises(ExhaustedError) as caught:
        world.borrowers.connect(pids[0], 100, "another", "engine", Link(lambda _: None))
    assert (caught.value.reason, caught.value.retry_seconds) == ("TOO_MANY_CONNECTIONS", 1.0)
    assert world.borrowers.all() == before
    assert world.borrowers.connect(last.pid, 100, last.client_id, "engine", Link(lambda _: None)) is last
    world.borrowers.remove_exited(last)
    world.borrowers.connect(pids[0], 100, "another", "engine", Link(lambda _: None))


def test_rule_8_a_process_names_a_limited_number_of_sessions(world: World) -> None:
    leases = [TableLease(5, SessionNumber(number)) for number in range(1, MAX_SESSIONS + 2)]
    for lease in leases[:-1]:
        world.bind(world.first, lease)
    saved = world.saved
    with pytest.raises(ExhaustedError) as caught:
        world.bind(world.first, leases[-1])
    assert (caught.value.reason, caught.value.retry_seconds) == ("TOO_MANY_SESSIONS", 1.0)
    assert (world.first.leases, world.saved) == ({*leases[:-1]}, saved)
    world.bind(world.first, leases[0])  # it is named already
    world.bind(world.second, leases[-1])


def test_rule_4_an_answer_to_an_earlier_fence_does_not_count(world: World) -> None:
    for lease in (ONE, TWO):
        world.bind(world.first, lease)
    world.borrowers.narrow(1, ())
    world.borrowers.narrow(2, ())
    world.borrowers.narrow(3, ())
    assert [fence.fence_sequence for fence in world.sent[world.first]] == [1, 2], "the third excludes nothing new"
    world.answered(world.first, 1)
    assert world.borrowers.pending == (1, 2)
    world.answered(world.first, 2)
    assert world.borrowers.is_drained


def test_the_end_of_an_epoch_excludes_all_steps_of_processes_that_mapped_in_it(world: World) -> None:
    world.bind(world.first, ONE)
    world.borrowers.end()
    assert [fence.epoch for fence in world.sent[world.first]] == [0]
    assert not world.borrowers.is_drained
    world.borrowers.begin(6)
    world.borrowers.open(6)
    world.borrowers.remove_exited(world.first)
    assert world.borrowers.is_drained


def test_processes_of_an_earlier_lender_are_waited_for(world: World) -> None:
    world.bind(world.first, ONE)
    later = World()
    later.borrowers.remove_exited(later.first)
    borrowers = BorrowerRegistry(lambda _: None, lambda _: None)
    borrowers.begin(5)
    restored = [borrowers.restore(past, 5) for past in world.saved]
    assert [each.pid for each in restored] == [1, 2]
    assert borrowers.is_drained, "the epoch may go on"
    sent: list[FenceSent] = []
    new = Link(sent.append)
    assert borrowers.connect(1, 100, "id", "engine", new) is restored[0]
    borrowers.resend_fence(restored[0], new)
    borrowers.begin(5)
    borrowers.narrow(1, ())
    assert borrowers.pending == (1,)
    assert sent == [FenceSent(1, 5, 1, ())]
    assert borrowers.connect(1, 200, "id", "engine", new) is not restored[0], "another process with the same id"


def test_processes_of_sessions_are_killed_with_the_scheduler_and_no_others(world: World) -> None:
    scheduler, other = world.connected(3, "scheduler"), world.connected(4, "scheduler")
    for process, session in ((world.first, ONE), (scheduler, ONE), (world.second, TWO), (other, TWO)):
        world.bind(process, session)
    world.borrowers.kill([TableLease(4, ONE.session_number), TableLease(6, ONE.session_number)])
    assert world.killed == [], "of other epochs"
    world.borrowers.kill([ONE])
    assert world.killed == [1, 3]


def test_the_processes_that_map_the_memory_are_named(world: World) -> None:
    world.connected(3, "scheduler")
    assert world.borrowers.mapping_processes == (MappingProcess(1, "engine"), MappingProcess(2, "engine"))
    for pid in range(10, 10 + MAX_MAPPING_PROCESSES):
        world.mapping(pid)
    assert len(world.borrowers.mapping_processes) == MAX_MAPPING_PROCESSES
