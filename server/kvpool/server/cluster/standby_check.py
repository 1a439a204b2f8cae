"""Which standbys a primary accepts."""

import time
from typing import Final

from kvpool.core.errors import ExhaustedError, WrongStateError
from kvpool.server.cluster.directory import MAX_MEMBERS, Member, MemberId
from kvpool.server.cluster.facts import Role
from kvpool.server.cluster.member_settings import MemberSettings
from kvpool.server.cluster.messages import OTHER_VERSION, Hello, core_fingerprint
from kvpool.server.cluster.record_codec import check_member
from kvpool.server.cluster.replica import Replica

_WAITING_SECONDS: Final = 5.0
"""Time since its last attempt for which a refused standby of another version counts as waiting."""


class StandbyCheck:
    """Checks the hello of standbys.

    Args:
        settings: The settings.
        replica: The primary's replica.
    """

    def __init__(self, settings: MemberSettings, replica: Replica) -> None:
        self._settings = settings
        self._replica = replica
        self._refused: dict[MemberId, tuple[Member, float]] = {}  # of another version, and when

    @property
    def waiting(self) -> list[Member]:
        """Standbys of another version, which wait for a hand-over."""
        now_seconds = time.monotonic()
        return [member for member, seconds in self._refused.values() if now_seconds - seconds < _WAITING_SECONDS]

    def check(self, token: str, hello: Hello) -> None:
        """Checks a standby.

        Args:
            token: Its token; empty for none.
            hello: The rest of its first frame.

        Raises:
            KvpoolError: The standby is refused.
        """
        settings, replica = self._settings, self._replica
        if settings.tokens:
            settings.tokens.check_standby(token)
        if hello.shard != settings.shard:
            raise WrongStateError("OTHER_SHARD", f"this server belongs to shard {settings.shard}, not {hello.shard}")
        if replica.role is not Role.PRIMARY or hello.term != replica.known_term:
            raise replica.not_primary_error
        check_member(hello.member)
        member_id = hello.member.member_id
        if len(replica.standbys.connected.keys() - {member_id}) >= MAX_MEMBERS - 1:
            raise ExhaustedError("TOO_MANY_MEMBERS", f"the shard has {MAX_MEMBERS} servers, the maximum")
        if member_id == settings.me.member_id:
            raise WrongStateError("SAME_MEMBER", "the server has the identity of this one: its journal was copied")
        if member_id != replica.successor:
            self._check_core(hello)

    def _check_core(self, hello: Hello) -> None:
        """Refuses a standby of another version, and records that it waits for a hand-over."""
        if hello.core == core_fingerprint():
            return
        others = {member.member_id: self._refused[member.member_id] for member in self.waiting}
        self._refused = {**others, hello.member.member_id: (hello.member, time.monotonic())}
        message = "the servers run different versions: this one gets the state when the primary hands over"
        raise WrongStateError(OTHER_VERSION, message)
