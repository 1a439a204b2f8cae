"""The primary's side of replication: sends each record to the standbys.

1. A standby that resumes, or has loaded a snapshot, gets each frame when it is appended. One that has not caught up
   gets the kept frames first, as fast as it reads.
2. A snapshot is sent when the replica says so: to a standby that is not in sync.
3. A connection that sends no hello in time, too much, or something else, is closed; so are the oldest ones without a
   hello if there are many. See `Acceptor` for those that have not finished the handshake of TLS.
"""

import asyncio
import logging
from typing import Final

from kvpool.core.errors import InvalidArgumentError, KvpoolError
from kvpool.server.cluster import events, messages
from kvpool.server.cluster.directory import Member, MemberId
from kvpool.server.cluster.member_settings import MemberSettings
from kvpool.server.cluster.record_buffer import MARK, RecordBuffer
from kvpool.server.cluster.replica import Driver
from kvpool.server.cluster.replicated_state import ReplicatedState
from kvpool.server.cluster.standby_check import StandbyCheck
from kvpool.server.cluster.standbys import NOTHING
from kvpool.server.codec import DamageError
from kvpool.server.journal.snapshot import snapshot_frames
from kvpool.wire import link
from kvpool.wire.acceptor import Acceptor
from kvpool.wire.address import host_and_port
from kvpool.wire.errors import to_status
from kvpool.wire.frames import FrameReader, encode_frame

MAX_PENDING: Final = 16
"""Maximum number of connections that have sent no hello. One more ends the oldest of them."""

HANDSHAKE_SECONDS: Final = 5.0
STALL_SECONDS: Final = 10.0
"""Maximum time for which a standby that loads a snapshot may read nothing."""
_CHUNK_BYTES: Final = 256 * 1024
_MAX_ACKNOWLEDGEMENT_BYTES: Final = 64
_FIRST_STATE: Final = link.server_state(_MAX_ACKNOWLEDGEMENT_BYTES)

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
        self.log = RecordBuffer(settings.cluster.replication_log_bytes)
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
        self.log = RecordBuffer(self._settings.cluster.replication_log_bytes)
        self.driver.replica.step(events.Appended(NOTHING))

    def append(self, frame: bytes) -> None:
        """Sends the frame of a record."""
        self.num_records += 1
        self._send(encode_frame(link.Kind.ANSWER, frame))

    def mark(self) -> None:
        """Sends a position without a record."""
        self._send(MARK)

    def beat(self) -> None:
        """Sends a mark, unless something was sent since the last call: a standby takes over from a silent primary."""
        if self.log.last_position == self._beat_position:
            self.mark()
        self._beat_position = self.log.last_position

    def _send(self, frame: bytes) -> None:
        self.log.append(frame)
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

    def opened(self, connection: "StandbyConnection") -> None:
        """Handles a new connection."""
        self._open[connection] = None
        pending = [each for each in self._open if each.member is None]
        for each in pending[:-MAX_PENDING]:  # some may be aborted already, and are closed later
            each.abort()

    def closed(self, connection: "StandbyConnection") -> None:
        """Handles the end of a connection."""
        self._open.pop(connection, None)
        member = connection.member
        if member and self.connections.get(member.member_id) is connection:
            del self.connections[member.member_id]
            _log.warning("standby lost", extra={"member": member.member_id, "address": member.addresses})
            self.driver.step(events.StandbyLost(member.member_id))

    def accept(self, connection: "StandbyConnection", token: str, hello: messages.Hello) -> None:
        """Handles a standby's hello.

        Raises:
            KvpoolError: The standby is refused.
        """
        self._check.check(token, hello)
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


class StandbyConnection(asyncio.Protocol):
    """The connection of one standby.

    Args:
        replicator: The replicator that accepted it.

    Attributes:
        member: The standby; None before its hello.
        is_live: Whether it gets each frame when it is appended.
    """

    def __init__(self, replicator: Replicator) -> None:
        self.member: Member | None = None
        self.is_live = False
        self._acknowledged = NOTHING
        self._replicator = replicator
        self._transport: asyncio.Transport
        self._reader = FrameReader(_FIRST_STATE)
        self._timer: asyncio.TimerHandle | None = None
        self._snapshot: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    # Of asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Waits for the hello."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - asyncio promises it
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, self.abort)
        self._replicator.opened(self)

    def data_received(self, received: bytes) -> None:
        """Handles the frames of the standby."""
        try:
            for kind, payload in self._reader.feed(received):
                if kind == link.Kind.HELLO:
                    self._replicator.accept(self, *messages.read_hello(payload))
                else:
                    self._acknowledge(payload)
        except KvpoolError as error:
            self._refuse(error)
        except DamageError as error:
            self._refuse(InvalidArgumentError("message", str(error), reason="MALFORMED"))

    def connection_lost(self, _: Exception | None) -> None:
        """Reports the end."""
        if self._timer:
            self._timer.cancel()
        if self._snapshot:
            self._snapshot.cancel()
        self._writable.set()
        self._replicator.closed(self)

    def pause_writing(self) -> None:
        """Records that the standby reads slowly."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Records that the standby has read."""
        self._writable.set()

    # Of the replicator

    def accept(self, member: Member, position: int, kept: list[bytes] | None) -> None:
        """Accepts the standby. It resumes with the kept frames after a position; None: it waits for a snapshot."""
        self.member = member
        if self._timer:
            self._timer.cancel()
        if kept is not None:
            self._welcome(position, resumes=True)
            self.write(b"".join(kept))
            self.is_live = True

    def write(self, content: bytes) -> None:
        """Sends bytes; queued if the standby reads slowly."""
        self._replicator.num_sent_bytes += len(content)
        self._transport.write(content)

    def abort(self) -> None:
        """Ends the connection at once."""
        self._transport.abort()

    async def close(self) -> None:
        """Ends the connection at once, and waits until it reads no snapshot of the state."""
        self.abort()
        if self._snapshot:
            self._snapshot.cancel()
            await asyncio.wait([self._snapshot])

    def start_snapshot(self) -> None:
        """Sends a snapshot, and the frames since then, in a task."""
        self._snapshot = asyncio.create_task(self._send_snapshot(), name="send_snapshot")
        self._snapshot.add_done_callback(self._snapshot_ended)

    def _acknowledge(self, payload: bytes) -> None:
        replicator, position = self._replicator, messages.acknowledged_position(payload)
        if self.member is None or not self._acknowledged <= position <= replicator.log.last_position:
            raise DamageError(f"an acknowledgement of position {position}")
        self._acknowledged = position
        if replicator.connections.get(self.member.member_id) is self:
            replicator.driver.step(events.Acknowledged(self.member.member_id, position))

    def _welcome(self, position: int, *, resumes: bool) -> None:
        now_seconds = self._replicator.state.clock.now_seconds()
        self.write(messages.welcome(messages.Welcome(position, resumes=resumes, now_seconds=now_seconds)))

    def _refuse(self, error: KvpoolError) -> None:
        if self._replicator.is_new_refusal(str(error)):
            _log.warning("standby refused", extra={"reason": error.reason, "error": str(error)})
        self.write(encode_frame(link.Kind.REFUSED, to_status(error).SerializeToString()))
        self._transport.close()  # when everything is sent

    async def _send_snapshot(self) -> None:
        replicator, state = self._replicator, self._replicator.state
        async with state.snapshot_lock:
            with state.state.snapshot() as snapshot:
                position = replicator.log.last_position
                self._welcome(position, resumes=False)
                for frame in snapshot_frames(snapshot):
                    self.write(encode_frame(link.Kind.ANSWER, frame))
                    await self._until_writable()
        while (frames := replicator.log.after(position)) is not None:
            if not frames:
                self.is_live = True
                return
            chunk = _chunk(frames)
            position += len(chunk)
            self.write(b"".join(chunk))
            await self._until_writable()
        _log.warning("standby too slow", extra={"member": self._member_id})
        self.abort()

    async def _until_writable(self) -> None:
        async with asyncio.timeout(STALL_SECONDS):
            await self._writable.wait()
        await asyncio.sleep(0)

    def _snapshot_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            if isinstance(error, TimeoutError):
                _log.warning("standby does not read", extra={"member": self._member_id})
            else:
                _log.error("bug", extra={"method": "send_snapshot"}, exc_info=error)
            self.abort()

    @property
    def _member_id(self) -> str:
        return self.member.member_id if self.member else ""


def _chunk(frames: list[bytes]) -> list[bytes]:
    """The first frames, up to about `_CHUNK_BYTES`, at least one."""
    size_bytes = 0
    for count, frame in enumerate(frames, start=1):
        size_bytes += len(frame)
        if size_bytes >= _CHUNK_BYTES:
            return frames[:count]
    return frames
