"""What a connection observes: the shard's primary, and the servers that replace each other."""

from collections.abc import Awaitable, Callable, Iterator

import pytest

from kvpool.client.blocking import run
from kvpool.client.primary_connection import PrimaryConnection
from kvpool.client.server_link import ServerLink
from kvpool.core.errors import UnavailableError
from kvpool.v1 import directory_pb2
from kvpool.wire.channels import ClientCredentials

P, S, T = "p:1", "s:1", "t:1"


class Link(ServerLink):
    """A connection to nothing."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True


def shard(term: int, primary: str, *standbys: str) -> directory_pb2.Shard:
    members = [directory_pb2.Member(addresses=[primary], is_primary=True)]
    members += [directory_pb2.Member(addresses=[standby]) for standby in standbys]
    return directory_pb2.Shard(name="s", term=term, primary_addresses=[primary], members=members)


class Observer:
    """Observes, with the reports that a test gives.

    Attributes:
        connection: The connection.
        observed: Addresses that were observed, in order.
    """

    def __init__(self, address: str) -> None:
        self.connection = PrimaryConnection(address, ClientCredentials(), Link)
        self.observed: list[str] = []

    def observe(self, *reports: directory_pb2.Shard) -> bool:
        """Observes one server, which sends these reports, then fails. Returns whether to observe the next one now."""
        left = iter(reports)

        def watch(link: ServerLink) -> Callable[[], Awaitable[directory_pb2.Shard]]:
            self.observed.append(link.address)
            return lambda: self._read(left)

        return run(self.connection.observe(watch))

    @staticmethod
    async def _read(left: Iterator[directory_pb2.Shard]) -> directory_pb2.Shard:
        if report := next(left, None):
            return report
        raise UnavailableError("ENDED", "the server ended the watch")


@pytest.fixture
def observer() -> Observer:
    """Observes a shard of which only the primary is known."""
    return Observer(P)


def test_a_primary_that_is_alone_names_its_first_standby(observer: Observer) -> None:
    observer.observe(shard(1, P), shard(1, P, S))
    observer.observe()
    assert observer.observed == [P, S]


def test_a_standby_that_is_gone_is_replaced_by_what_the_primary_names(observer: Observer) -> None:
    observer.observe(shard(1, P, S))
    observer.observe(shard(1, P, S))  # it dies
    observer.observe(shard(1, P), shard(1, P, T))
    observer.observe(shard(1, P, T), shard(2, T))
    assert observer.observed == [P, S, P, T]
    assert observer.connection.target == T


def test_a_standby_that_takes_over_is_observed_until_it_has_a_standby(observer: Observer) -> None:
    observer.observe(shard(1, P, S))
    observer.observe(shard(1, P, S), shard(2, S), shard(2, S, T))
    observer.observe()
    assert observer.observed == [P, S, T]
    assert observer.connection.target == S


def test_the_next_server_is_observed_without_a_pause_unless_one_has_failed(observer: Observer) -> None:
    """Else a primary that stops within the pause would be left only after a call has timed out."""
    assert not observer.observe()  # the primary does not answer
    assert observer.observe(shard(1, P), shard(1, P, S)), "a standby has come"
    assert observer.observe(shard(1, P, S), shard(2, S)), "it has become the primary"
    assert not observer.observe()


def test_a_standby_that_does_not_answer_is_tried_in_turn_with_the_primary(observer: Observer) -> None:
    observer.observe(shard(1, P, S))
    for _ in range(2):
        observer.observe()
        observer.observe(shard(1, P, S))
    assert observer.observed == [P, S, P, S, P]


def test_a_server_that_reports_no_members_is_left_for_the_other_addresses() -> None:
    observer = Observer(f"{P},{S}")
    report = directory_pb2.Shard(term=1, primary_addresses=[P])
    observer.observe(report)
    observer.observe(report)
    observer.observe()
    assert observer.observed == [S, P, S]
