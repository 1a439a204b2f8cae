"""Who is a rank of a pool at the moment, by rank and by stream, and what they must say alike.

1. One member a rank, one rank a stream.
2. A rank is absent exactly if it has no member, or one that is silent or lost.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from kvpool.core.errors import WrongStateError
from kvpool.core.ranks.messages import Allocated, LinkId, Rank, RankGroupOptions, RankInfo, RankState, Registration
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import differing_field


@dataclass(slots=True, eq=False)
class Member:
    """A process that is, or was a moment ago, a rank.

    Attributes:
        registration: What it said of itself.
        link: Its stream; the last one if it is lost.
        last_seen_seconds: When it was last heard of.
        state: How it is.
        away_seconds: Since when it is silent or lost.
        allocated: What it got in this epoch.
        fence_sent: Newest fence that it was sent; 0 for none.
        fence_answered: Newest that it has answered.
    """

    registration: Registration
    link: LinkId
    last_seen_seconds: float
    state: RankState = RankState.REGISTERED
    away_seconds: float = 0.0
    allocated: Allocated | None = None
    fence_sent: int = 0
    fence_answered: int = 0

    @property
    def is_away(self) -> bool:
        """Whether it is silent or lost."""
        return self.state in (RankState.SILENT, RankState.LOST)


class RankRegistry:
    """The members of one pool.

    Attributes:
        world_size: Ranks that the pool takes.
        options: What they all said.
    """

    def __init__(self) -> None:
        self.world_size = 0
        self.options = RankGroupOptions(1)
        self._members: dict[Rank, Member] = {}
        self._by_link: dict[LinkId, Member] = {}
        self._absent: set[Rank] = set()
        self._layers: dict[str, dict[Rank, KVCacheSpec]] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        """The members there are now, whatever becomes of them meanwhile."""
        return iter(list(self._members.values()))

    @property
    def is_complete(self) -> bool:
        """Whether every rank is there."""
        return not self._absent

    @property
    def num_absent(self) -> int:
        """Ranks that are not there."""
        return len(self._absent)

    def is_absent(self, rank: Rank) -> bool:
        """Whether a rank is not there."""
        return rank in self._absent

    def first_absent(self, count: int) -> tuple[Rank, ...]:
        """The first ranks that are not there, in order."""
        return tuple(heapq.nsmallest(count, self._absent))

    def of_rank(self, rank: int) -> Member | None:
        """The member that is a rank."""
        return self._members.get(Rank(rank))

    def of_link(self, link: LinkId) -> Member | None:
        """The member that a stream is of."""
        return self._by_link.get(link)

    def registrations(self) -> list[Registration]:
        """What each rank said, in order; all are there."""
        return [self._members[Rank(rank)].registration for rank in range(self.world_size)]

    def rank_infos(self) -> tuple[RankInfo, ...]:
        """How each rank is."""
        return tuple(self._rank_info(Rank(rank)) for rank in range(self.world_size))

    def reset(self, world_size: int, options: RankGroupOptions) -> None:
        """Takes other ranks from now on; there is no member left."""
        self.world_size, self.options = world_size, options
        self._absent = set(map(Rank, range(world_size)))

    def add(self, member: Member) -> None:
        """Takes a member in, whose rank is free."""
        rank = member.registration.rank
        self._members[rank] = member
        self._by_link[member.link] = member
        self._absent.discard(rank)
        for name, spec in member.registration.layers.items():
            self._layers.setdefault(name, {})[rank] = spec

    def remove(self, member: Member) -> None:
        """Forgets a member."""
        rank = member.registration.rank
        del self._members[rank]
        del self._by_link[member.link]
        self._absent.add(rank)
        for name in member.registration.layers:
            del self._layers[name][rank]
            if not self._layers[name]:
                del self._layers[name]

    def mark_away(self, member: Member, state: RankState, now_seconds: float) -> None:
        """Notes that a member is silent or lost."""
        member.state, member.away_seconds = state, now_seconds
        self._absent.add(member.registration.rank)

    def mark_present(self, member: Member, state: RankState) -> None:
        """Notes that a silent member is heard of again."""
        member.state = state
        self._absent.discard(member.registration.rank)

    def check_agreement(self, registration: Registration) -> None:
        """Checks that a rank says what the others say.

        Raises:
            WrongStateError: It differs; names the field.
        """
        if registration.world_size != self.world_size:
            raise WrongStateError(
                "RANKS_DISAGREE",
                f"{registration.world_size}, the other ranks say {self.world_size}",
                field="register.world_size",
            )
        field = self.options.difference(registration.options)
        if field:
            mine, theirs = getattr(registration.options, field), getattr(self.options, field)
            raise WrongStateError(
                "RANKS_DISAGREE", f"{mine}, the other ranks say {theirs}", field=f"register.options.{field}"
            )
        for name, spec in registration.layers.items():
            others = ((rank, known) for rank, known in self._layers.get(name, {}).items() if rank != registration.rank)
            rank, known = next(others, (registration.rank, spec))
            different = differing_field(known, spec)
            if different:
                raise WrongStateError(
                    "RANKS_DISAGREE_ON_A_LAYER",
                    f"{_value(spec, different)}, rank {rank} says {_value(known, different)}",
                    field=f'register.layers["{name}"].{different}',
                )

    def _rank_info(self, rank: Rank) -> RankInfo:
        member = self._members.get(rank)
        if member is None:
            return RankInfo(rank, RankState.ABSENT)
        said, got = member.registration, member.allocated
        return RankInfo(
            rank,
            member.state,
            said.device,
            said.host,
            said.pid,
            said.available_bytes,
            got.allocated_bytes if got else 0,
            got.num_blocks if got else 0,
        )


def _value(spec: KVCacheSpec, field: str) -> object:
    return type(spec).__name__ if field == "type" else getattr(spec, field)
