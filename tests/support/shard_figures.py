"""Figures of a server of a shard, for tests of metrics."""

from types import SimpleNamespace
from typing import cast

from kvpool.core.statistics import Histogram
from kvpool.server.cluster.facts import Role
from kvpool.server.cluster.shard_member import ShardMember


def shard_member(role: Role = Role.PRIMARY) -> ShardMember:
    """A server with one standby, 3 changes behind, and one wait of 0.5 s for it."""
    confirm_seconds = Histogram((0.001, 1.0))
    confirm_seconds.observe(0.5)
    standby = SimpleNamespace(acknowledged=4, lag_seconds=lambda _: 0.2)
    member = SimpleNamespace(
        name="llama",
        replica=SimpleNamespace(
            role=role,
            known_term=7,
            in_sync=("a", "b"),
            num_missing=1,
            num_lost_states=1,
            last_position=7,
            standbys=SimpleNamespace(connected={"b": standby}),
        ),
        num_takeovers=1,
        replicator=SimpleNamespace(num_records=11, num_sent_bytes=1300),
        client=SimpleNamespace(num_differences=0),
        gate=SimpleNamespace(waits=confirm_seconds),
        directory_client=SimpleNamespace(error=""),
    )
    return cast("ShardMember", member)
