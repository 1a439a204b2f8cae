"""Fences: messages that make the ranks reject the steps of ended sessions, and the ranks' answers.

1. Fences are numbered from 1, also across epochs. An answer to a fence answers all earlier ones.
2. A session in quarantine waits for the first fence that named it as ended.
3. The session is released when every rank has answered that fence or a newer one, and none named it as pending in its
   last answer. A rank that is silent or lost delays the release. Answers name sessions because one step that hangs, or
   one stopped engine, would else hold back the blocks of all later sessions.
"""

from collections.abc import Collection, Sequence

from kvpool.core.errors import InvalidArgumentError, check_range
from kvpool.core.ids import SessionNumber
from kvpool.core.ranks.effects import Effect, MessageSent, SessionsFenced
from kvpool.core.ranks.messages import MAX_NAMED_SESSIONS, FenceSet
from kvpool.core.ranks.registry import Member, RankRegistry


class Fences:
    """The fences of one pool."""

    def __init__(self, registry: RankRegistry) -> None:
        self._registry = registry
        self._sequence = 0
        self._awaited: dict[SessionNumber, int] = {}
        """The first fence that named each session that waits as ended."""

    @property
    def are_answered(self) -> bool:
        """Whether every rank answers fences."""
        return all(member.registration.fences for member in self._registry)

    def begin(
        self,
        epoch: int,
        last: SessionNumber,
        live: Sequence[SessionNumber],
        awaiting: Collection[SessionNumber],
        killed: Sequence[SessionNumber] = (),
    ) -> list[Effect]:
        """Starts the next fence; see `Membership.fence`."""
        self._sequence += 1
        for number in awaiting:
            self._awaited.setdefault(number, self._sequence)
        message = FenceSet(self._sequence, epoch, last, tuple(live), tuple(killed))
        effects: list[Effect] = []
        for member in self._registry:
            if member.registration.fences and not member.is_away:
                member.fence_sent = self._sequence
                effects.append(MessageSent(member.link, message))
        return effects

    def answered(self, member: Member, sequence: int, pending: Collection[SessionNumber]) -> list[Effect]:
        """Records the answer of a rank to a fence; see `Membership.fenced`."""
        if not 1 <= sequence <= member.fence_sent:
            message = f"{sequence} was not sent; the newest fence is {member.fence_sent}"
            raise InvalidArgumentError("fenced.fence_sequence", message)
        check_range("fenced.pending_session_numbers", len(pending), 0, MAX_NAMED_SESSIONS)
        if sequence >= member.fence_answered:
            member.fence_answered, member.fence_pending = sequence, frozenset(pending)
        by_all = min(other.fence_answered for other in self._registry)
        held = frozenset[SessionNumber]().union(*(other.fence_pending for other in self._registry))
        done = tuple(number for number, named_by in self._awaited.items() if named_by <= by_all and number not in held)
        for number in done:
            del self._awaited[number]
        return [SessionsFenced(done)] if done else []

    def clear(self) -> None:
        """Forgets the pending sessions, as the epoch has ended."""
        self._awaited.clear()
