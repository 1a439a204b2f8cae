"""The primary's side of replication: sends each record to the followers, and takes their acknowledgements.

1. A follower that resumes, or has loaded a snapshot, gets each frame when it is appended. One that has not caught up
   gets the kept frames first, as fast as it reads.
2. A snapshot is sent only to a follower that is not in sync (`Replica.may_load_snapshot`).
3. A connection that sends no HELLO in time, too much, or something else, is closed; so are the oldest ones without a
   HELLO if there are many. See `Acceptor` for those that have not finished the handshake of TLS.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Final

from kvpool.core.errors import KvpoolError
from kvpool.core.state import State
from kvpool.server.cluster.acceptor import Acceptor
from kvpool.server.cluster.directory import Member, MemberId
from kvpool.server.cluster.messages import (
    MAX_HELLO_BYTES,
    Hello,
    Refused,
    Welcome,
    acknowledged_position,
    hello_of,
    to_frame,
)
from kvpool.server.cluster.record_buffer import MARK, RecordBuffer
from kvpool.server.cluster.replica import NOTHING, Effect, Replica
from kvpool.server.codec import DamageError
from kvpool.server.journal.frames import Frame, FrameKind, FrameParser
from kvpool.server.journal.snapshot import snapshot_frames

MAX_PENDING_LINKS: Final = 16
"""Maximum number of connections that have sent no HELLO. One more ends the oldest of them."""
HANDSHAKE_SECONDS: Final = 5.0
STALL_SECONDS: Final = 10.0
"""Maximum time for which a follower that loads a snapshot may read nothing."""
_CLOSE_LAG: Final = 256
"""Positions by which a follower may be behind when the primary begins to wait for it."""
_MAX_ACKNOWLEDGEMENT_BYTES: Final = 64
_POLL_SECONDS: Final = 0.01
_CHUNK_BYTES: Final = 256 * 1024

_log = logging.getLogger("kvpool.server.cluster")


class Shipper:
    """Sends records to the followers of one primary.

    Args:
        replica: Decides what is confirmed.
        state: The state of which followers get snapshots.
        snapshot_lock: Held while a snapshot of the state is read.
        check: Raises a KvpoolError if a follower is to be refused.
        carry_out: Carries out what the replica decides, and lets out what is confirmed.
        max_log_bytes: See `RecordBuffer`.
        now_seconds: The monotonic time.
        state_seconds: The time on the clock of the state's leases.

    Attributes:
        links: The connections of followers, by member.
        late_seconds: By member, how long answers have waited for it too long; without those that are on time. See
            `Standbys`.
        num_records: Records of all terms.
        num_sent_bytes: Bytes sent to all followers, snapshots included.
    """

    def __init__(  # noqa: PLR0913 - the parts that it connects
        self,
        replica: Replica,
        state: State,
        snapshot_lock: asyncio.Lock,
        *,
        check: Callable[[Hello], None],
        carry_out: Callable[[list[Effect]], None],
        max_log_bytes: int,
        now_seconds: Callable[[], float],
        state_seconds: Callable[[], float],
    ) -> None:
        self.links: dict[MemberId, FollowerLink] = {}
        self.late_seconds: dict[MemberId, float] = {}
        self.num_records = 0
        self.num_sent_bytes = 0
        self.replica = replica
        self.state = state
        self.snapshot_lock = snapshot_lock
        self.carry_out = carry_out
        self.now_seconds = now_seconds
        self.state_seconds = state_seconds
        self.log = RecordBuffer(max_log_bytes)
        self._check = check
        self._max_log_bytes = max_log_bytes
        self._open: dict[FollowerLink, None] = {}  # in the order in which they came
        self._acceptor: Acceptor | None = None
        self._refusal = ""

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Accepts followers from now on. Returns the port.

        Raises:
            OSError: The address cannot be bound.
        """
        self._acceptor = Acceptor(lambda: FollowerLink(self), tls, HANDSHAKE_SECONDS)
        return await self._acceptor.listen(host, port)

    async def close(self) -> None:
        """Closes all connections, without a report that followers are lost: they may take over.

        Waits until no snapshot of the state is read, because the journal writes its last one next.
        """
        if self._acceptor:
            self._acceptor.close()
        self.links.clear()
        await asyncio.gather(*(link.close() for link in list(self._open)))

    def begin(self) -> None:
        """Begins a term, without records."""
        self.log = RecordBuffer(self._max_log_bytes)
        self.late_seconds.clear()
        self.replica.appended(NOTHING)

    def append(self, frame: bytes) -> None:
        """Sends the frame of a record."""
        self.num_records += 1
        self._send(frame)

    def mark(self) -> None:
        """Sends a position without a record."""
        self._send(MARK)

    def measure_lags(self) -> None:
        """Records when each follower falls behind. Call it regularly, as lags are as exact as the interval is short."""
        now_seconds = self.now_seconds()
        for link in self.links.values():
            if link.acknowledged >= link.due_position:
                link.due_position, link.due_seconds = self.log.last_position, now_seconds

    def lets_join(self, member_id: MemberId) -> bool:
        """Whether a follower that has caught up is awaited from now on: one that was late must keep up first.

        It need not if the primary cannot answer without it, or awaits it anyway.
        """
        if self.replica.lacks_members:
            self.late_seconds.pop(member_id, None)
        return member_id not in self.late_seconds or member_id in self.replica.awaited

    def _send(self, frame: bytes) -> None:
        self.log.append(frame)
        self.replica.appended(self.log.last_position)
        for link in self.links.values():
            if link.is_live:
                link.write(frame)

    def opened(self, link: "FollowerLink") -> None:
        """Takes a new connection."""
        self._open[link] = None
        pending = [each for each in self._open if each.member is None]
        for each in pending[:-MAX_PENDING_LINKS]:  # some may be aborted already, and are closed later
            each.abort()

    def is_new_refusal(self, message: str) -> bool:
        """Whether the last refusal was another one, so that this one should be logged: standbys try often."""
        before, self._refusal = self._refusal, message
        return message != before

    def closed(self, link: "FollowerLink") -> None:
        """Takes the end of a connection."""
        self._open.pop(link, None)
        if link.member and self.links.get(link.member.member_id) is link:
            del self.links[link.member.member_id]
            _log.warning("standby lost", extra={"member": link.member.member_id, "address": link.member.addresses})
            self.carry_out(self.replica.follower_lost(link.member.member_id))

    def accept(self, link: "FollowerLink", hello: Hello) -> None:
        """Takes a follower's HELLO.

        Raises:
            KvpoolError: The follower is refused.
        """
        self._check(hello)
        member = hello.member
        before = self.links.pop(member.member_id, None)
        if before:
            before.abort()
        link.member = member
        self.links[member.member_id] = link
        kept = self.log.after(hello.resumed_position) if hello.resumed_term == hello.term else None
        resumes = kept is not None
        self._refusal = ""
        _log.info("standby connected", extra={"member": member.member_id, "resumes": resumes})
        if kept is not None:
            link.write(
                to_frame(Welcome(hello.resumed_position, resumes=True, now_seconds=self.state_seconds()))
                + b"".join(kept)
            )
            link.is_live = True
        else:
            link.start_snapshot()
        self.carry_out(self.replica.follower_connected(member, resumes=resumes))


class FollowerLink(asyncio.Protocol):
    """The connection of one follower.

    Attributes:
        member: The follower; None before its HELLO.
        is_live: Whether it gets each frame when it is appended.
        acknowledged: The last position that it has acknowledged.
        due_position: A position that it had not acknowledged at `due_seconds`.
        due_seconds: See `due_position`.
    """

    def __init__(self, shipper: Shipper) -> None:
        self.member: Member | None = None
        self.is_live = False
        self.acknowledged = NOTHING
        self.due_position = NOTHING
        self.due_seconds = shipper.now_seconds()
        self._shipper = shipper
        self._transport: asyncio.Transport | None = None
        self._parser = FrameParser(MAX_HELLO_BYTES)
        self._timer: asyncio.TimerHandle | None = None
        self._snapshot: asyncio.Task[None] | None = None
        self._is_caught_up = False
        self._writable = asyncio.Event()
        self._writable.set()

    # Of asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Waits for HELLO."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - asyncio promises it
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, self.abort)
        self._shipper.opened(self)

    def data_received(self, received: bytes) -> None:
        """Handles the frames of the follower."""
        try:
            for frame in self._parser.feed(received):
                self._handle(frame)
        except KvpoolError as error:
            self._refuse(error.reason, str(error))
        except DamageError as error:
            self._refuse("MALFORMED", str(error))

    def connection_lost(self, _: Exception | None) -> None:
        """Reports the end."""
        if self._timer:
            self._timer.cancel()
        if self._snapshot:
            self._snapshot.cancel()
        self._writable.set()
        self._shipper.closed(self)

    def pause_writing(self) -> None:
        """Notes that the follower reads slowly."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Notes that the follower has read."""
        self._writable.set()

    # Of the shipper

    def lag_seconds(self, now_seconds: float) -> float:
        """How long a position has waited for its acknowledgement; 0 if none waits."""
        return now_seconds - self.due_seconds if self.acknowledged < self.due_position else 0.0

    def write(self, content: bytes) -> None:
        """Sends bytes; queued if the follower reads slowly."""
        if self._transport:
            self._shipper.num_sent_bytes += len(content)
            self._transport.write(content)

    def abort(self) -> None:
        """Ends the connection at once."""
        if self._transport:
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

    def _handle(self, frame: Frame) -> None:
        if self.member is None:
            if frame.kind is not FrameKind.HELLO:
                raise DamageError(f"a {frame.kind.name} instead of a HELLO")
            hello = hello_of(frame.payload)
            if self._timer:
                self._timer.cancel()
            self._parser.max_payload_bytes = _MAX_ACKNOWLEDGEMENT_BYTES
            self._shipper.accept(self, hello)
            return
        position = acknowledged_position(frame.payload)
        if (
            frame.kind is not FrameKind.ACKNOWLEDGED
            or not self.acknowledged <= position <= self._shipper.log.last_position
        ):
            raise DamageError(f"a {frame.kind.name} of position {position}")
        self.acknowledged = position
        if not self._is_caught_up:
            is_close = self.is_live and self._shipper.log.last_position - position <= _CLOSE_LAG
            self._is_caught_up = is_close and self._shipper.lets_join(self.member.member_id)
        if self._is_caught_up and self._shipper.links.get(self.member.member_id) is self:
            self._shipper.carry_out(self._shipper.replica.acknowledged(self.member.member_id, position))

    def _refuse(self, reason: str, message: str) -> None:
        if self._shipper.is_new_refusal(message):
            _log.warning("standby refused", extra={"reason": reason, "error": message})
        self.write(to_frame(Refused(reason, message)))
        self._close()

    def _close(self) -> None:
        """Ends the connection when everything is sent."""
        if self._transport:
            self._transport.close()

    async def _send_snapshot(self) -> None:
        shipper, member = self._shipper, self.member
        while member and not shipper.replica.may_load_snapshot(member.member_id):  # noqa: ASYNC110 - a swap takes longer
            await asyncio.sleep(_POLL_SECONDS)
        async with shipper.snapshot_lock:
            with shipper.state.snapshot() as snapshot:
                position = shipper.log.last_position
                self.write(to_frame(Welcome(position, resumes=False, now_seconds=shipper.state_seconds())))
                for frame in snapshot_frames(snapshot):
                    self.write(frame)
                    await self._until_writable()
        while (frames := shipper.log.after(position)) is not None:
            if not frames:
                self.is_live = True
                return
            chunk = _chunk(frames)
            position += len(chunk)
            self.write(b"".join(chunk))
            await self._until_writable()
        _log.warning("standby too slow", extra={"member": member.member_id if member else ""})
        self.abort()

    async def _until_writable(self) -> None:
        async with asyncio.timeout(STALL_SECONDS):
            await self._writable.wait()
        await asyncio.sleep(0)

    def _snapshot_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            if isinstance(error, TimeoutError):
                _log.warning("standby does not read", extra={"member": self.member.member_id if self.member else ""})
            else:
                _log.error("bug", extra={"method": "send_snapshot"}, exc_info=error)
            self.abort()


def _chunk(frames: list[bytes]) -> list[bytes]:
    """The first frames, up to about `_CHUNK_BYTES`, at least one."""
    size_bytes = 0
    for count, frame in enumerate(frames, start=1):
        size_bytes += len(frame)
        if size_bytes >= _CHUNK_BYTES:
            return frames[:count]
    return frames
