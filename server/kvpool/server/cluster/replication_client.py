"""The standby's side of replication: connects to the primary, and keeps what it has executed."""

import asyncio
import logging
from typing import Final

from kvpool.server.cluster import events
from kvpool.server.cluster.directory import Member
from kvpool.server.cluster.member_settings import MemberSettings
from kvpool.server.cluster.messages import VERSION, Hello, core_fingerprint, to_frame
from kvpool.server.cluster.primary_stream import PrimaryStream
from kvpool.server.cluster.recorder import Recorder
from kvpool.server.cluster.replica import Driver
from kvpool.server.cluster.replicated_state import ReplicatedState
from kvpool.server.cluster.standbys import NOTHING
from kvpool.wire.address import host_and_port

CONNECT_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 0.2

_log = logging.getLogger("kvpool.server.cluster")


class ReplicationClient:
    """Follows one primary after the other.

    Args:
        driver: Runs the replica, which decides whom to follow, and what to acknowledge.
        settings: The settings.
        state: The state, which follows the primary's.
        recorder: Ends the process when a record was executed in part: this state must not take over.

    Attributes:
        resumed_term: Term of the state; 0 if it needs a snapshot.
        position: Last executed position in that term.
        num_differences: Number of times that the state differed from the primary's.
    """

    def __init__(self, driver: Driver, settings: MemberSettings, state: ReplicatedState, recorder: Recorder) -> None:
        self.driver = driver
        self.state = state
        self.recorder = recorder
        self.resumed_term = 0
        self.position = NOTHING
        self.num_differences = 0
        self._settings = settings
        self._task: asyncio.Task[None] | None = None
        self._stream: PrimaryStream | None = None
        self._followed: tuple[int, Member] | None = None
        self._failure = ""

    def __repr__(self) -> str:
        return f"<ReplicationClient: term {self.resumed_term}, position {self.position}>"

    @property
    def heard(self) -> events.PrimaryHeard | None:
        """When the primary was heard last; None if there is no connection."""
        stream = self._stream
        return events.PrimaryHeard(stream.heard_seconds, stream.is_following) if stream else None

    def follow(self, term: int, primary: Member) -> None:
        """Follows a primary, unless it is followed already."""
        if self._followed == (term, primary):
            return
        delay_seconds = RETRY_SECONDS if self._followed is None and self._task else 0.0
        self.leave()
        self._followed = term, primary
        self._task = asyncio.create_task(self._connect(term, primary, delay_seconds), name="follow")

    def leave(self) -> None:
        """Ends the connection. Nothing is executed or acknowledged any more."""
        if self._task:
            self._task.cancel()
        if self._stream:
            self._stream.leave()
        self._stream, self._followed = None, None

    def acknowledge(self, position: int) -> None:
        """Acknowledges everything up to a position."""
        if self._stream:
            self._stream.acknowledge(position)

    def hello(self, term: int) -> Hello:
        """The first message in a term.

        Raises:
            OSError: The token cannot be read.
        """
        settings = self._settings
        token, core = settings.cluster.replication_token(), core_fingerprint()
        return Hello(VERSION, settings.shard, core, token, settings.me, term, self.resumed_term, self.position)

    def ended(self, stream: PrimaryStream) -> None:
        """Handles the end of a connection."""
        if stream.is_following:
            _log.warning("primary lost", extra={"term": self.resumed_term})
        if stream is self._stream:
            self._stream, self._followed = None, None
            self.driver.step(events.StreamLost())

    def is_new_failure(self, text: str) -> bool:
        """Whether an attempt failed in another way than the one before, and should be logged; "" for a success."""
        before, self._failure = self._failure, text
        return text != before

    async def _connect(self, term: int, primary: Member, delay_seconds: float) -> None:
        await asyncio.sleep(delay_seconds)
        address = primary.replication_address
        try:
            await self._open(term, address)
        except (OSError, ValueError) as error:  # UnicodeError of a name or a token is a ValueError
            if self.is_new_failure(f"{address}: {error}"):
                _log.warning("primary not reached", extra={"address": address, "error": str(error)})
            self._stream, self._followed = None, None
            self.driver.step(events.StreamLost())

    async def _open(self, term: int, address: str) -> None:
        host, port = host_and_port("replication_address", address)
        stream = self._stream = PrimaryStream(self, term, to_frame(self.hello(term)))
        async with asyncio.timeout(CONNECT_SECONDS):
            await asyncio.get_running_loop().create_connection(
                lambda: stream, host, port, ssl=self._settings.client_tls
            )
