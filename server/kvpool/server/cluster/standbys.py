"""Counts the standbys of a primary, admits spares while it lacks some, and dismisses surplus ones.

1. A spare is admitted while fewer standbys than wanted are in sync, connected or promised. Others are always admitted.
2. A spare is dismissed when the wanted number is in sync without it, for `adopt_seconds`. So a standby that is in sync
   always remains, and one that returns only for a moment costs nothing.
3. A member that is in sync, or may become so by a swap, is never refused: its state may be needed.
"""

from typing import Final

from kvpool.core.errors import ExhaustedError
from kvpool.server.cluster.config import ClusterConfig
from kvpool.server.cluster.directory import MemberId
from kvpool.server.cluster.messages import ENOUGH_STANDBYS, Hello
from kvpool.server.cluster.replica import Effect, Replica
from kvpool.server.cluster.shipper import Shipper

PROMISE_SECONDS: Final = 10.0
"""Time in which a spare that was answered WELCOME connects. Its process starts again before."""


class Standbys:
    """Counts the standbys of a primary.

    Args:
        config: The settings.
        replica: Knows who is in sync.
        shipper: Knows who is connected.
        me: The primary.
    """

    def __init__(self, config: ClusterConfig, replica: Replica, shipper: Shipper, me: MemberId) -> None:
        self._wanted = config.wanted_standbys
        self._adopt_seconds = config.adopt_seconds
        self._replica = replica
        self._shipper = shipper
        self._me = me
        self._promised: dict[MemberId, float] = {}  # until when
        self._surplus_since_seconds: float | None = None

    @property
    def num_missing(self) -> int:
        """Number of standbys that the shard lacks, those that are not in sync included."""
        return max(self._wanted - len(self._in_sync), 0)

    @property
    def _in_sync(self) -> set[MemberId]:
        return {member.member_id for member in self._replica.in_sync} - {self._me}

    def check_spare(self, hello: Hello, now_seconds: float) -> None:
        """Checks that there is a place for a spare, and keeps it for one that asks.

        Raises:
            ExhaustedError: There is none.
        """
        member_id = hello.member.member_id
        promised = {each: due for each, due in self._promised.items() if due > now_seconds and each != member_id}
        others = self._replica.awaited | self._shipper.links.keys() | promised.keys()
        if member_id not in self._replica.awaited and len(others - {member_id}) >= self._wanted:
            raise ExhaustedError(ENOUGH_STANDBYS, f"the shard has {self._wanted} standbys, as many as it should have")
        self._promised = {**promised, member_id: now_seconds + PROMISE_SECONDS} if hello.asks else promised

    def dismiss_surplus(self, now_seconds: float) -> list[Effect]:
        """Ends the connections of dismissed spares, and dismisses one that the shard has had too many for a while."""
        links, in_sync = self._shipper.links, self._in_sync
        for member_id in self._replica.dismissed & links.keys():
            links[member_id].abort()
        surplus = [each for each, link in links.items() if link.is_spare and len(in_sync - {each}) >= self._wanted]
        if not surplus:
            self._surplus_since_seconds = None
            return []
        since_seconds = self._surplus_since_seconds
        if since_seconds is None:
            self._surplus_since_seconds = since_seconds = now_seconds
        return self._replica.dismiss(surplus[-1]) if now_seconds - since_seconds >= self._adopt_seconds else []
