"""A standby's connection to its primary: executes the primary's records, and acknowledges them.

1. A record is executed, then written to the journal, then acknowledged.
2. A snapshot is loaded beside the state, and replaces it as a whole. It is acknowledged when the journal has it too.
3. A record with another result than at the primary shows that the states differ. The standby then has no state.
4. Nothing is acknowledged unless the replica says so (`Replica`, I4), or after the connection was left.
"""

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final

from kvpool.core.errors import KvpoolError
from kvpool.server.cluster import events
from kvpool.server.cluster.messages import Refused, acknowledgement, answer_of
from kvpool.server.cluster.standbys import NOTHING
from kvpool.server.journal.frames import DamageError, Frame, FrameKind, FrameParser
from kvpool.server.journal.records import MismatchError

if TYPE_CHECKING:
    from kvpool.server.cluster.replication_client import ReplicationClient

_SNAPSHOT_KINDS: Final = (FrameKind.SNAPSHOT, FrameKind.SLICE, FrameKind.END)

_log = logging.getLogger("kvpool.server.cluster")


class PrimaryStream(asyncio.Protocol):
    """A connection to the primary of a term.

    Args:
        client: The client that made it.
        term: The term.
        hello: The first frame.

    Attributes:
        is_following: Whether the primary sends records, and its silence means something.
        heard_seconds: When the primary was heard last.
        is_left: Whether the connection has ended, so that nothing is executed.
    """

    def __init__(self, client: "ReplicationClient", term: int, hello: bytes) -> None:
        self.is_following = False
        self.heard_seconds = time.monotonic()
        self.is_left = False
        self._client = client
        self._term = term
        self._hello = hello
        self._transport: asyncio.Transport | None = None
        self._parser = FrameParser()
        self._is_welcome = False
        self._snapshot: list[Frame] = []
        self._snapshot_position = NOTHING
        self._executed: int | None = None  # the position that was reported last
        self._later: list[bytes] = []  # received while a snapshot is loaded
        self._loading: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends HELLO."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - asyncio promises it
        self._transport = transport
        transport.write(self._hello)

    def data_received(self, received: bytes) -> None:
        """Executes the frames of the primary."""
        self.heard_seconds = time.monotonic()
        if self.is_left:
            return
        if self._loading:
            self._later.append(received)
            return
        client = self._client
        try:
            with contextlib.closing(self._parser.feed(received)) as frames:
                for frame in frames:
                    if self.is_following:
                        self._execute(frame)
                    else:
                        self._handle(frame)
                    if self._loading:
                        break  # the parser keeps the frames after it
        except DamageError as error:
            _log.error("primary not understood", extra={"error": str(error)})
            self.leave()
        except (MismatchError, KvpoolError) as error:
            _log.critical("state differs from the primary's", extra={"error": f"{type(error).__name__}: {error}"})
            self.leave()
            client.resumed_term = 0
            client.num_differences += 1
            client.state.clear()
            client.driver.step(events.StateDiffers())
        else:
            self._report()

    def connection_lost(self, _: Exception | None) -> None:
        """Reports the end."""
        self.is_left = True
        if self._loading:
            self._loading.cancel()
        self._client.ended(self)

    def acknowledge(self, position: int) -> None:
        """Acknowledges everything up to a position."""
        if self._transport and not self.is_left:
            self._transport.write(acknowledgement(position))

    def leave(self) -> None:
        """Ends the connection."""
        self.is_left = True
        if self._transport:
            self._transport.abort()

    def _execute(self, frame: Frame) -> None:
        if frame.kind is FrameKind.RECORD:
            try:
                self._client.state.execute(frame.payload)
            except (DamageError, MismatchError, KvpoolError):
                raise
            except BaseException:
                self._client.recorder.give_up_after_bug()
                raise
        elif frame.kind is not FrameKind.MARK:
            raise DamageError(f"a {frame.kind.name} instead of a record")
        self._client.position += 1

    def _handle(self, frame: Frame) -> None:
        if not self._is_welcome:
            self._answered(frame)
        elif frame.kind in _SNAPSHOT_KINDS:
            self._snapshot.append(frame)
            if frame.kind is FrameKind.END:
                self._loading = asyncio.create_task(self._load(), name="load_snapshot")
        else:
            raise DamageError(f"a {frame.kind.name} instead of a snapshot")

    def _report(self) -> None:
        """Reports what was executed, once the journal has it too."""
        position = self._client.position
        if self.is_following and position != self._executed and not self._client.state.journal.is_behind:
            self._executed = position
            self._client.driver.step(events.Executed(position))

    def _answered(self, frame: Frame) -> None:
        client, answer = self._client, answer_of(frame.kind, frame.payload)
        if isinstance(answer, Refused):
            if client.is_new_failure(answer.message):
                _log.warning("refused by the primary", extra={"reason": answer.reason, "error": answer.message})
            self.leave()
            return
        self._is_welcome, self.is_following = True, answer.resumes
        client.is_new_failure("")
        client.state.primary_seconds = answer.now_seconds
        if answer.resumes:
            client.position = answer.position
        self._snapshot_position = answer.position
        client.driver.step(events.Welcomed())

    async def _load(self) -> None:
        client = self._client
        frames, self._snapshot = self._snapshot, []
        try:
            loaded = await client.state.load(frames)
        except DamageError as error:
            _log.error("snapshot not understood", extra={"error": str(error)})
            self.leave()
            return
        except Exception:  # noqa: BLE001 - it has changed nothing
            _log.exception("bug", extra={"method": "load_snapshot"})
            self.leave()
            return
        if self.is_left:
            return
        client.state.replace(loaded)
        client.resumed_term, client.position = self._term, self._snapshot_position
        client.driver.step(events.SnapshotLoaded())
        self.is_following, self._loading = True, None
        for received in (b"", *self._later):  # first what the parser has kept
            self.data_received(received)
        self._later.clear()
        pools, sessions = client.state.state.pools, client.state.state.sessions
        _log.info("snapshot loaded", extra={"pools": len(pools), "sessions": len(sessions)})
