"""Decides which shard a spare asks whether it may join. No I/O, no clock.

1. A shard is asked when the servers that are in sync have not changed for `adopt_seconds`. So a standby that restarts
   is not replaced, and a shard that begins is left to its own servers.
2. Shards without a standby come first, then those with fewer standbys, then those without a server in the spare's zone.
   Among equals chance decides, so that several spares do not all ask the same primary.
3. A shard that refused, or did not answer, is asked again after a pause that doubles, and at once by rule 1 when the
   servers that are in sync have changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

from kvpool.server.cluster.directory import MAX_MEMBERS, NAME, MemberId, ShardName, ShardRecord

FIRST_PAUSE_SECONDS: Final = 5.0
MAX_PAUSE_SECONDS: Final = 300.0


@dataclass(slots=True)
class _Seen:
    """What is known of a shard.

    Attributes:
        record: Its record.
        members: The servers that are in sync.
        due_seconds: When it may be asked.
        num_refusals: How often it was asked in vain.
    """

    record: ShardRecord
    members: frozenset[MemberId]
    due_seconds: float
    num_refusals: int = 0


class ShardChoice:
    """The shards of a cluster, as one spare sees them.

    Args:
        zone: Zone of the spare; empty: none.
        adopt_seconds: Time for which a shard must not have changed.
        random: Chance.
    """

    def __init__(self, zone: str, adopt_seconds: float, random: Random) -> None:
        self._zone = zone
        self._adopt_seconds = adopt_seconds
        self._random = random
        self._shards: dict[ShardName, _Seen] = {}

    def saw(self, records: Mapping[ShardName, ShardRecord], now_seconds: float) -> None:
        """Takes the records of all shards."""
        seen, self._shards = self._shards, {}
        for name, record in records.items():
            if not NAME.fullmatch(name):
                continue
            members = frozenset(member.member_id for member in record.in_sync)
            shard = seen.get(name)
            if shard is None or shard.members != members:
                shard = _Seen(record, members, now_seconds + self._adopt_seconds)
            shard.record = record
            self._shards[name] = shard

    def choose(self, now_seconds: float) -> tuple[ShardName, ShardRecord] | None:
        """The shard to ask now; None if there is none."""
        due = [name for name, shard in self._shards.items() if self._may_ask(shard, now_seconds)]
        if not due:
            return None
        name = min(due, key=lambda name: (*self._rank(self._shards[name]), self._random.random()))
        return name, self._shards[name].record

    def refused(self, name: ShardName, now_seconds: float) -> None:
        """Notes that a shard refused this spare, or did not answer."""
        shard = self._shards[name]
        pause_seconds = min(FIRST_PAUSE_SECONDS * 2**shard.num_refusals, MAX_PAUSE_SECONDS)
        shard.num_refusals = min(shard.num_refusals + 1, 16)
        shard.due_seconds = now_seconds + pause_seconds * self._random.uniform(0.5, 1.5)

    def _may_ask(self, shard: _Seen, now_seconds: float) -> bool:
        return shard.due_seconds <= now_seconds and len(shard.members) < MAX_MEMBERS

    def _rank(self, shard: _Seen) -> tuple[int, bool]:
        is_zone_taken = bool(self._zone) and any(member.zone == self._zone for member in shard.record.in_sync)
        return len(shard.members), is_zone_taken
