"""`kvpool shard move`, with a cluster that a test plays."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvpool.client.admin import Shard
from kvpool.core.errors import KvpoolError, WrongStateError
from support.command import kvpool

P, S = "p:1", "s:1"
ALONE = Shard("two", 7, (P,), ())
IN_SYNC = Shard("two", 7, (P,), ((S,),))
NO_PRIMARY = Shard("two", 7, (), ())
NO_STANDBY = WrongStateError("NO_STANDBY", "")


class Cluster:
    """Plays the answers to an operator.

    Attributes:
        listed: The shard, as it is listed by each call; the last one remains.
        answers: The answers to the hand-overs.
        calls: The addresses that were connected for each hand-over, and its standby.
    """

    def __init__(self) -> None:
        self.listed: list[Shard] = []
        self.answers: list[KvpoolError | None] = []
        self.calls: list[tuple[str, str]] = []
        self._address = ""

    @contextmanager
    def connected(self, address: str) -> Iterator["Cluster"]:
        self._address = address
        yield self

    def shards(self) -> tuple[Shard, ...]:
        return (self.listed.pop(0) if len(self.listed) > 1 else self.listed[0],)

    def hand_over(self, to: str) -> tuple[int, tuple[str, ...]]:
        self.calls.append((self._address, to))
        if error := self.answers.pop(0):
            raise error
        return 8, (to,)

    def move(self, wait_seconds: float = 60.0) -> str:
        done = kvpool("shard", "move", "two", S, "--wait-seconds", wait_seconds)
        return done.stderr if done.returncode else done.stdout


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr("kvpool.cli.shard.connected", made.connected)
    monkeypatch.setattr("kvpool.cli.shard._POLL_SECONDS", 0.001)
    return made


def test_a_server_of_another_version_is_handed_over_to_at_once(cluster: Cluster) -> None:
    """It is never in sync."""
    cluster.listed, cluster.answers = [ALONE], [None]
    assert cluster.move() == "the primary of term 8 is at s:1\n"
    assert cluster.calls == [(P, S)]


def test_a_server_that_cannot_take_over_yet_is_waited_for(cluster: Cluster) -> None:
    cluster.listed, cluster.answers = [ALONE, ALONE, IN_SYNC], [NO_STANDBY, None]
    assert cluster.move() == "the primary of term 8 is at s:1\n"
    assert cluster.calls == [(P, S), (f"{P},{S}", S)]


def test_a_server_that_does_not_take_over_is_not_asked_again(cluster: Cluster) -> None:
    """Each attempt may hold the steps for 30 s."""
    cluster.listed, cluster.answers = [ALONE], [NO_STANDBY]
    assert "NO_STANDBY: HOST:PORT: no server of shard two at s:1 is in sync, or it did not" in cluster.move(0.05)
    assert cluster.calls == [(P, S)]


def test_a_shard_without_a_primary_is_waited_for(cluster: Cluster) -> None:
    cluster.listed, cluster.answers = [NO_PRIMARY, IN_SYNC], [None]
    assert cluster.move() == "the primary of term 8 is at s:1\n"
    assert cluster.calls == [(f"{P},{S}", S)]


def test_other_refusals_are_not_waited_out(cluster: Cluster) -> None:
    cluster.listed, cluster.answers = [ALONE], [WrongStateError("NO_SHARD", "")]
    assert "NO_SHARD" in cluster.move()


def test_a_server_that_is_the_primary_stays(cluster: Cluster) -> None:
    cluster.listed = [Shard("two", 9, (S,), ((P,),))]
    assert cluster.move() == "the primary of term 9 is at s:1\n"
    assert cluster.calls == []
