"""Random schedules of a shard. Each broken rule is noticed within a few hundred of them."""

import pytest

from kvpool.server.cluster.directory import MemberId, ShardRecord
from kvpool.server.cluster.replica import Replica
from simulation.shard.run import run
from simulation.shard.world import BrokenPromiseError, World


def test_promises_are_kept() -> None:
    assert run(World, range(300)) > 600


@pytest.mark.slow
def test_promises_are_kept_in_many_schedules() -> None:
    assert run(World, range(300, 10_000)) > 20_000


class AcknowledgingTooLong(World):
    acknowledges_too_long = True


class ReadingUnconfirmed(World):
    reads_unconfirmed = True


class EpochsIgnoringTheTerm(World):
    epochs_ignore_the_term = True


class _AddingEarly(Replica):
    def _await_others(self, record: ShardRecord) -> list[MemberId]:
        super()._await_others(record)
        return list(self._followers)


class AddingEarly(World):
    new_replica = _AddingEarly


class _AwaitingKnown(Replica):
    @property
    def awaited(self) -> set[MemberId]:
        return {member.member_id for member in self.in_sync} - {self._me.member_id}


class AwaitingKnown(World):
    """A member that is about to be added is not awaited."""

    new_replica = _AwaitingKnown


class _AwaitingNew(Replica):
    @property
    def awaited(self) -> set[MemberId]:
        newest = self._pending.record.in_sync if self._pending else self.in_sync
        return {member.member_id for member in newest} - {self._me.member_id}


class AwaitingNew(World):
    """A member is no longer awaited once the swap that removes it was sent."""

    new_replica = _AwaitingNew


class _NeverWithdrawing(Replica):
    def _withdraw(self, record: ShardRecord) -> list[object]:  # type: ignore[override]
        self.has_state = True
        return self._claim(record.term + 1)  # type: ignore[return-value]


class NeverWithdrawing(World):
    """A member that lost its state takes over."""

    new_replica = _NeverWithdrawing


@pytest.mark.parametrize(
    "world",
    [
        AcknowledgingTooLong,
        ReadingUnconfirmed,
        EpochsIgnoringTheTerm,
        AddingEarly,
        AwaitingKnown,
        AwaitingNew,
        NeverWithdrawing,
    ],
)
def test_a_broken_rule_is_noticed(world: type[World]) -> None:
    with pytest.raises(BrokenPromiseError):
        run(world, range(2000))
