"""Which standbys a primary accepts."""

import time
from collections.abc import Callable
from typing import Final

from kvpool.core.errors import ExhaustedError, NotPrimaryError, WrongStateError
from kvpool.server.cluster.directory import MAX_MEMBERS, Member, MemberId
from kvpool.server.cluster.messages import OTHER_VERSION, VERSION, Hello, core_fingerprint
from kvpool.server.cluster.record_codec import check_member
from kvpool.server.cluster.replica import Replica, Role
from kvpool.server.cluster.shipper import Shipper

_WAITING_SECONDS: Final = 5.0
"""Time since its last attempt for which a refused standby of another version counts as waiting."""


class Admission:
    """Checks the HELLO of followers.

    Args:
        shard: `CLUSTER/SHARD`.
        replica: The primary's replica.
        shipper: Its connections to followers.
        me: The primary.
        check_token: Raises a KvpoolError unless a standby may have the state; None without tokens.
        not_primary: Makes the error that names the primary.

    Attributes:
        copies_to: The standby of another version that gets the state now, for a hand-over; None for none.
    """

    def __init__(  # noqa: PLR0913 - the parts that it connects
        self,
        shard: str,
        replica: Replica,
        shipper: Shipper,
        me: MemberId,
        *,
        check_token: Callable[[str], None] | None,
        not_primary: Callable[[], NotPrimaryError],
    ) -> None:
        self.copies_to: MemberId | None = None
        self._shard = shard
        self._replica = replica
        self._shipper = shipper
        self._me = me
        self._check_token = check_token
        self._not_primary = not_primary
        self._refused: dict[MemberId, tuple[Member, float]] = {}  # of another version, and when

    @property
    def waiting(self) -> list[Member]:
        """Standbys of another version, which wait for a hand-over."""
        now_seconds = time.monotonic()
        return [member for member, seconds in self._refused.values() if now_seconds - seconds < _WAITING_SECONDS]

    def check(self, hello: Hello) -> None:
        """Checks a HELLO.

        Raises:
            KvpoolError: The follower is refused.
        """
        if self._check_token:
            self._check_token(hello.token)
        if hello.version != VERSION:
            message = "the servers run versions that do not understand each other: plan a restart with the journal"
            raise WrongStateError(OTHER_VERSION, message)
        if hello.shard != self._shard:
            raise WrongStateError("OTHER_SHARD", f"this server belongs to shard {self._shard}, not {hello.shard}")
        if self._replica.role is not Role.PRIMARY or hello.term != self._replica.known_term:
            raise self._not_primary()
        check_member(hello.member)
        member_id = hello.member.member_id
        if len(self._shipper.links.keys() - {member_id}) >= MAX_MEMBERS - 1:
            raise ExhaustedError("TOO_MANY_MEMBERS", f"the shard has {MAX_MEMBERS} servers, the maximum")
        if member_id == self._me:
            raise WrongStateError("SAME_MEMBER", "the server has the identity of this one: its journal was copied")
        if member_id == self.copies_to:
            return
        self._check_core(hello)

    def _check_core(self, hello: Hello) -> None:
        """Refuses a follower of another version, and notes that it waits for a hand-over."""
        if hello.core == core_fingerprint():
            return
        others = {member.member_id: self._refused[member.member_id] for member in self.waiting}
        self._refused = {**others, hello.member.member_id: (hello.member, time.monotonic())}
        message = "the servers run different versions: this one gets the state when the primary hands over"
        raise WrongStateError(OTHER_VERSION, message)
