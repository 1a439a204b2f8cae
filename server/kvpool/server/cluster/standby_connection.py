"""A standby's connection at the primary: HELLO, records and snapshots to it, acknowledgements from it."""

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from kvpool.core.errors import KvpoolError
from kvpool.server.cluster import events
from kvpool.server.cluster.directory import Member
from kvpool.server.cluster.messages import (
    MAX_HELLO_BYTES,
    Refused,
    Welcome,
    acknowledged_position,
    hello_of,
    to_frame,
)
from kvpool.server.cluster.standbys import NOTHING
from kvpool.server.journal.frames import DamageError, Frame, FrameKind, FrameParser
from kvpool.server.journal.snapshot import snapshot_frames

if TYPE_CHECKING:
    from kvpool.server.cluster.replicator import Replicator

HANDSHAKE_SECONDS: Final = 5.0
STALL_SECONDS: Final = 10.0
"""Maximum time for which a standby that loads a snapshot may read nothing."""
_MAX_ACKNOWLEDGEMENT_BYTES: Final = 64
_CHUNK_BYTES: Final = 256 * 1024

_log = logging.getLogger("kvpool.server.cluster")


class StandbyConnection(asyncio.Protocol):
    """The connection of one standby.

    Args:
        replicator: The replicator that accepted it.

    Attributes:
        member: The standby; None before its HELLO.
        is_live: Whether it gets each frame when it is appended.
    """

    def __init__(self, replicator: "Replicator") -> None:
        self.member: Member | None = None
        self.is_live = False
        self._acknowledged = NOTHING
        self._replicator = replicator
        self._transport: asyncio.Transport | None = None
        self._parser = FrameParser(MAX_HELLO_BYTES)
        self._timer: asyncio.TimerHandle | None = None
        self._snapshot: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    # Of asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Waits for HELLO."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - asyncio promises it
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, self.abort)
        self._replicator.opened(self)

    def data_received(self, received: bytes) -> None:
        """Handles the frames of the standby."""
        try:
            for frame in self._parser.feed(received):
                if self.member is None:
                    self._hello(frame)
                else:
                    self._acknowledge(self.member, frame)
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
        if kept is not None:
            self._welcome(position, resumes=True)
            self.write(b"".join(kept))
            self.is_live = True

    def write(self, content: bytes) -> None:
        """Sends bytes; queued if the standby reads slowly."""
        if self._transport:
            self._replicator.num_sent_bytes += len(content)
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

    def _hello(self, frame: Frame) -> None:
        if frame.kind is not FrameKind.HELLO:
            raise DamageError(f"a {frame.kind.name} instead of a HELLO")
        hello = hello_of(frame.payload)
        if self._timer:
            self._timer.cancel()
        self._parser.max_payload_bytes = _MAX_ACKNOWLEDGEMENT_BYTES
        self._replicator.accept(self, hello)

    def _acknowledge(self, member: Member, frame: Frame) -> None:
        replicator, position = self._replicator, acknowledged_position(frame.payload)
        is_possible = self._acknowledged <= position <= replicator.log.last_position
        if frame.kind is not FrameKind.ACKNOWLEDGED or not is_possible:
            raise DamageError(f"a {frame.kind.name} of position {position}")
        self._acknowledged = position
        if replicator.connections.get(member.member_id) is self:
            replicator.driver.step(events.Acknowledged(member.member_id, position))

    def _welcome(self, position: int, *, resumes: bool) -> None:
        now_seconds = self._replicator.state.clock.now_seconds()
        self.write(to_frame(Welcome(position, resumes=resumes, now_seconds=now_seconds)))

    def _refuse(self, reason: str, message: str) -> None:
        if self._replicator.is_new_refusal(message):
            _log.warning("standby refused", extra={"reason": reason, "error": message})
        self.write(to_frame(Refused(reason, message)))
        if self._transport:
            self._transport.close()  # when everything is sent

    async def _send_snapshot(self) -> None:
        replicator, state = self._replicator, self._replicator.state
        async with state.snapshot_lock:
            with state.state.snapshot() as snapshot:
                position = replicator.log.last_position
                self._welcome(position, resumes=False)
                for frame in snapshot_frames(snapshot):
                    self.write(frame)
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
