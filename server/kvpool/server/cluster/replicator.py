"""The primary's side of replication: sends each record to the standbys.

1. A standby that resumes, or has loaded a snapshot, gets each frame when it is appended. One that has not caught up
   gets the kept frames first, as fast as it reads.
2. A snapshot is sent when the replica says so: to a standby that is not in sync.
3. A connection that sends no HELLO in time, too much, or something else, is closed; so are the oldest ones without a
   HELLO if there are many. See `Acceptor` for those that have not finished the handshake of TLS.
"""

import asyncio
import logging
from typing import Final

from kvpool.server.cluster import events
from kvpool.server.cluster.acceptor import Acceptor
from kvpool.server.cluster.directory import MemberId
from kvpool.server.cluster.log import ReplicationLog
from kvpool.server.cluster.member_settings import MemberSettings
from kvpool.server.cluster.messages import Hello
from kvpool.server.cluster.replica import Driver
from kvpool.server.cluster.replicated_state import ReplicatedState
from kvpool.server.cluster.standby_check import StandbyCheck
from kvpool.server.cluster.standby_connection import HANDSHAKE_SECONDS, StandbyConnection
from kvpool.server.cluster.standbys import NOTHING
from kvpool.wire.address import host_and_port

MAX_PENDING: Final = 16
"""Maximum number of connections that have sent no HELLO. One more ends the oldest of them."""

_log = logging.getLogger("kvpool.server.cluster")


class Replicator:
    """Sends records to the standbys of one primary.

    Args:
        driver: Runs the replica, which decides what is confirmed.
        settings: The settings.
        state: The state of which standbys get snapshots.
        check: The standbys that are accepted.

    Attributes:
        log: The records of this term.
        connections: The connections of standbys, by member.
        num_records: Records of all terms.
        num_sent_bytes: Bytes sent to all standbys, snapshots included.
    """

    def __init__(self, driver: Driver, settings: MemberSettings, state: ReplicatedState, check: StandbyCheck) -> None:
        self.driver = driver
        self.state = state
        self.connections: dict[MemberId, StandbyConnection] = {}
        self.num_records = 0
        self.num_sent_bytes = 0
        self.log = ReplicationLog(settings.cluster.replication_log_bytes)
        self._settings = settings
        self._check = check
        self._open: dict[StandbyConnection, None] = {}  # in the order in which they came
        self._acceptor: Acceptor | None = None
        self._refusal = ""
        self._beat_position = NOTHING

    async def listen(self) -> int:
        """Accepts standbys from now on. Returns the port.

        Raises:
            OSError: The address cannot be bound.
        """
        address = self._settings.cluster.replication_listen
        self._acceptor = Acceptor(lambda: StandbyConnection(self), self._settings.server_tls, HANDSHAKE_SECONDS)
        try:
            return await self._acceptor.listen(*host_and_port("replication_listen", address))
        except OSError as error:
            raise OSError(f"replication_listen: cannot listen on {address}") from error

    async def close(self) -> None:
        """Closes all connections, without a report that standbys are lost: they may take over.

        Waits until no snapshot of the state is read, because the journal writes its last one next.
        """
        if self._acceptor:
            self._acceptor.close()
        self.connections.clear()
        await asyncio.gather(*(connection.close() for connection in list(self._open)))

    def begin(self) -> None:
        """Begins a term, without records."""
        self.log = ReplicationLog(self._settings.cluster.replication_log_bytes)
        self.driver.replica.step(events.Appended(NOTHING))

    def append(self, record: bytes) -> None:
        """Sends an encoded record."""
        self.num_records += 1
        self._send(self.log.append(record))

    def mark(self) -> None:
        """Sends a position without a record."""
        self._send(self.log.mark())

    def beat(self) -> None:
        """Sends a mark, unless something was sent since the last call: a standby takes over from a silent primary."""
        if self.log.last_position == self._beat_position:
            self.mark()
        self._beat_position = self.log.last_position

    def _send(self, frame: bytes) -> None:
        self.driver.replica.step(events.Appended(self.log.last_position))  # nothing is ready after it
        for connection in self.connections.values():
            if connection.is_live:
                connection.write(frame)

    def send_snapshot(self, member_id: MemberId) -> None:
        """Sends the state to a standby, then the records since then."""
        if connection := self.connections.get(member_id):
            connection.start_snapshot()

    def end(self, member_id: MemberId) -> None:
        """Ends the connection of a standby."""
        if connection := self.connections.get(member_id):
            connection.abort()

    def end_all(self) -> None:
        """Ends the connections of all standbys."""
        for member_id in list(self.connections):
            self.end(member_id)

    # Of the connections

    def opened(self, connection: StandbyConnection) -> None:
        """Handles a new connection."""
        self._open[connection] = None
        pending = [each for each in self._open if each.member is None]
        for each in pending[:-MAX_PENDING]:  # some may be aborted already, and are closed later
            each.abort()

    def closed(self, connection: StandbyConnection) -> None:
        """Handles the end of a connection."""
        self._open.pop(connection, None)
        member = connection.member
        if member and self.connections.get(member.member_id) is connection:
            del self.connections[member.member_id]
            _log.warning("standby lost", extra={"member": member.member_id, "address": member.addresses})
            self.driver.step(events.StandbyLost(member.member_id))

    def accept(self, connection: StandbyConnection, hello: Hello) -> None:
        """Handles a standby's HELLO.

        Raises:
            KvpoolError: The standby is refused.
        """
        self._check.check(hello)
        member = hello.member
        if before := self.connections.pop(member.member_id, None):
            before.abort()
        self.connections[member.member_id] = connection
        kept = self.log.after(hello.resumed_position) if hello.resumed_term == hello.term else None
        resumes = kept is not None
        self._refusal = ""
        _log.info("standby connected", extra={"member": member.member_id, "resumes": resumes})
        connection.accept(member, hello.resumed_position, kept)
        self.driver.step(events.StandbyConnected(member, resumes))

    def is_new_refusal(self, message: str) -> bool:
        """Whether the last refusal was another one, so that this one should be logged: standbys try often."""
        before, self._refusal = self._refusal, message
        return message != before
