"""The registered ranks of a pool, by rank and by stream, and the checks that they agree.

1. Each rank has at most one member; each stream belongs to one rank.
2. A rank is absent if and only if it has no member, or its member is silent or lost.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from kvpool.core.errors import WrongStateError
from kvpool.core.ids import SessionNumber
from kvpool.core.planning.grouping import field_value
from kvpool.core.ranks.declared import check_declared_alike
from kvpool.core.ranks.messages import (
    Allocated,
    LinkId,
    MappingProcess,
    Rank,
    RankGroupOptions,
    RankInfo,
    RankState,
    Registration,
)
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import differing_field


@dataclass(slots=True, eq=False)
class Member:
    """A process that is registered as a rank; it can be silent or lost.

    Attributes:
        registration: The registration of the process.
        link: Its stream; the last stream if it is lost.
        last_seen_seconds: Time of the last heartbeat or registration.
        state: State of the rank.
        away_seconds: Time at which it became silent or lost.
        allocated: Its allocation in this epoch; None before it allocated.
        fence_sent: Newest fence sent to it; 0 for none.
        fence_answered: Newest fence that it answered; 0 for none.
        fence_pending: Ended sessions that it named as pending in that answer.
        mapping_processes: Processes that may map its memory, as of its last heartbeat.
        is_expected: Whether it has no stream and counts as present, because its server was replaced, or could not
            answer it; until it registers again.
    """

    registration: Registration
    link: LinkId
    last_seen_seconds: float
    state: RankState = RankState.REGISTERED
    away_seconds: float = 0.0
    allocated: Allocated | None = None
    fence_sent: int = 0
    fence_answered: int = 0
    fence_pending: frozenset[SessionNumber] = frozenset()
    mapping_processes: tuple[MappingProcess, ...] = ()
    is_expected: bool = False

    @property
    def is_away(self) -> bool:
        """Whether the member is silent or lost."""
        return self.state in (RankState.SILENT, RankState.LOST)


class RankRegistry:
    """The members of one pool.

    Attributes:
        world_size: Number of ranks of the pool.
        options: The options of all ranks.
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
        """Iterates over a copy of the members, so that members can be removed meanwhile."""
        return iter(list(self._members.values()))

    @property
    def is_complete(self) -> bool:
        """Whether no rank is absent."""
        return not self._absent

    @property
    def absent(self) -> tuple[Rank, ...]:
        """The absent ranks, ascending."""
        return tuple(sorted(self._absent))

    @property
    def num_present(self) -> int:
        """Number of ranks that are not absent."""
        return self.world_size - len(self._absent)

    def is_absent(self, rank: Rank) -> bool:
        """Whether a rank is absent."""
        return rank in self._absent

    def first_absent(self, count: int) -> tuple[Rank, ...]:
        """The lowest absent ranks, at most `count`, ascending."""
        return tuple(heapq.nsmallest(count, self._absent))

    def of_rank(self, rank: int) -> Member | None:
        """The member of a rank; None if there is none."""
        return self._members.get(Rank(rank))

    def of_link(self, link: LinkId) -> Member | None:
        """The member of a stream; None if there is none."""
        return self._by_link.get(link)

    def in_order(self) -> list[Member]:
        """The members in rank order."""
        return sorted(self._members.values(), key=lambda member: member.registration.rank)

    def registrations(self) -> list[Registration]:
        """The registrations of the members, in rank order."""
        return [member.registration for member in self.in_order()]

    def rank_infos(self) -> tuple[RankInfo, ...]:
        """Information about each rank, in rank order."""
        return tuple(self._rank_info(Rank(rank)) for rank in range(self.world_size))

    @property
    def fingerprint(self) -> tuple[tuple[str, str], ...]:
        """What the contents of the memory that the ranks declare depend on; empty if they declare none."""
        declared = next((member.registration.declared for member in self._members.values()), None)
        return declared.fingerprint if declared else ()

    def reset(self, world_size: int, options: RankGroupOptions) -> None:
        """Sets a new world size and new options. The registry must have no member."""
        self.world_size, self.options = world_size, options
        self._absent = set(map(Rank, range(world_size)))

    def add(self, member: Member) -> None:
        """Adds a member. Its rank must have no member."""
        rank = member.registration.rank
        self._members[rank] = member
        self._by_link[member.link] = member
        self._absent.discard(rank)
        for name, spec in member.registration.layers.items():
            self._layers.setdefault(name, {})[rank] = spec

    def remove(self, member: Member) -> None:
        """Removes a member."""
        rank = member.registration.rank
        del self._members[rank]
        del self._by_link[member.link]
        self._absent.add(rank)
        for name in member.registration.layers:
            del self._layers[name][rank]
            if not self._layers[name]:
                del self._layers[name]

    def mark_away(self, member: Member, state: RankState, now_seconds: float) -> None:
        """Marks a member as silent or lost; its rank is absent."""
        member.state, member.away_seconds = state, now_seconds
        self._absent.add(member.registration.rank)

    def mark_present(self, member: Member, state: RankState) -> None:
        """Marks a silent member as present again."""
        member.state = state
        self._absent.discard(member.registration.rank)

    def check_agreement(self, registration: Registration) -> None:
        """Checks that a registration agrees with those of the other ranks. A rank alone may change everything.

        Raises:
            WrongStateError: The registration differs; names the field.
        """
        ranks = (member.registration for member in self._members.values())
        other = next((each for each in ranks if each.rank != registration.rank), None)
        if other is None:
            return
        if registration.world_size != self.world_size:
            raise WrongStateError(
                "RANKS_DISAGREE",
                f"{registration.world_size}, the other ranks have {self.world_size}",
                field="register.world_size",
            )
        check_declared_alike(registration, other)
        field = self.options.difference(registration.options)
        if field:
            mine, theirs = getattr(registration.options, field), getattr(self.options, field)
            raise WrongStateError(
                "RANKS_DISAGREE", f"{mine}, the other ranks have {theirs}", field=f"register.options.{field}"
            )
        for name, spec in registration.layers.items():
            others = ((rank, known) for rank, known in self._layers.get(name, {}).items() if rank != registration.rank)
            rank, known = next(others, (registration.rank, spec))
            different = differing_field(known, spec)
            if different:
                raise WrongStateError(
                    "RANKS_DISAGREE_ON_A_LAYER",
                    f"{field_value(spec, different)}, rank {rank} has {field_value(known, different)}",
                    field=f"register.{registration.layer_field(name)}.{different}",
                )

    def _rank_info(self, rank: Rank) -> RankInfo:
        member = self._members.get(rank)
        if member is None:
            return RankInfo(rank, RankState.ABSENT)
        registration, allocated = member.registration, member.allocated
        return RankInfo(
            rank,
            member.state,
            registration.device,
            registration.host,
            registration.pid,
            registration.available_bytes,
            allocated.allocated_bytes if allocated else 0,
            allocated.num_blocks if allocated else 0,
            member.mapping_processes,
        )
