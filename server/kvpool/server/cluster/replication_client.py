"""The standby's side of replication: executes the primary's records, and acknowledges them.

1. A record is executed, then written to the journal unless that is down, then acknowledged.
2. A snapshot is loaded beside the state, and replaces it as a whole. It is acknowledged when the journal has
   written it, or has given up.
3. A record with another result than at the primary shows that the states differ. The standby then has no state.
4. Nothing is acknowledged unless the replica says so (`Replica`, I4), or after the connection was left.
"""

import asyncio
import logging
import time
from collections import deque
from typing import Final

from kvpool.core.errors import KvpoolError
from kvpool.server.cluster import events, messages
from kvpool.server.cluster.directory import Member
from kvpool.server.cluster.facts import NOT_CONNECTED
from kvpool.server.cluster.member_settings import MemberSettings
from kvpool.server.cluster.recorder import Recorder
from kvpool.server.cluster.replica import Driver
from kvpool.server.cluster.replicated_state import ReplicatedState
from kvpool.server.cluster.standbys import NOTHING
from kvpool.server.codec import DamageError
from kvpool.server.journal.frames import Frame, FrameKind, decode_frame
from kvpool.server.journal.records import MismatchError
from kvpool.wire import link
from kvpool.wire.address import host_and_port
from kvpool.wire.backoff import Backoff
from kvpool.wire.frames import FrameReader

CONNECT_SECONDS: Final = 1.0

_SNAPSHOT_KINDS: Final = (FrameKind.SNAPSHOT, FrameKind.SLICE, FrameKind.END)

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
        backoff: The pauses before the next connection to the same primary.
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
        self.backoff = Backoff(0.1, 0.2)

    def __repr__(self) -> str:
        return f"<ReplicationClient: term {self.resumed_term}, position {self.position}>"

    @property
    def heard(self) -> events.PrimaryHeard:
        """When the primary was heard last."""
        stream = self._stream
        return events.PrimaryHeard(stream.heard_seconds, stream.is_following) if stream else NOT_CONNECTED

    def follow(self, term: int, primary: Member) -> None:
        """Follows a primary, unless it is followed already."""
        if self._followed == (term, primary):
            return
        delay_seconds = self.backoff.next() if self._followed is None and self._task else 0.0
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

    def hello(self, term: int) -> messages.Hello:
        """What this server says first in a term."""
        settings, core = self._settings, messages.core_fingerprint()
        return messages.Hello(settings.shard, core, settings.me, term, self.resumed_term, self.position)

    def ended(self, stream: "PrimaryStream") -> None:
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
        token = self._settings.cluster.replication_token()
        stream = self._stream = PrimaryStream(self, term, messages.hello(token, self.hello(term)))
        async with asyncio.timeout(CONNECT_SECONDS):
            await asyncio.get_running_loop().create_connection(
                lambda: stream, host, port, ssl=self._settings.client_tls
            )


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

    def __init__(self, client: ReplicationClient, term: int, hello: bytes) -> None:
        self.is_following = False
        self.heard_seconds = time.monotonic()
        self.is_left = False
        self._client = client
        self._term = term
        self._hello = hello
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(link.client_state())
        self._waiting: deque[tuple[int, bytes]] = deque()  # received frames; they wait while a snapshot is loaded
        self._snapshot: list[Frame] = []
        self._snapshot_position = NOTHING
        self._executed: int | None = None  # the position that was reported last
        self._loading: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the hello."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - asyncio promises it
        self._transport = transport
        transport.write(self._hello)

    def data_received(self, received: bytes) -> None:
        """Executes the frames of the primary."""
        self.heard_seconds = time.monotonic()
        if self.is_left:
            return
        client = self._client
        try:
            self._waiting += self._frames(received)
            while self._waiting and not self._loading:
                self._handle(*self._waiting.popleft())
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
            self._transport.write(messages.acknowledgement(position))

    def leave(self) -> None:
        """Ends the connection."""
        self.is_left = True
        if self._transport:
            self._transport.abort()

    def _frames(self, received: bytes) -> list[tuple[int, bytes]]:
        try:
            return self._reader.feed(received)
        except KvpoolError as error:  # it says nothing about the state
            raise DamageError(str(error)) from None

    def _handle(self, kind: int, payload: bytes) -> None:
        if kind == link.Kind.WELCOME:
            self._welcomed(messages.read_welcome(payload))
        elif kind == link.Kind.REFUSED:
            self._refused(link.read_refusal(payload))
        elif self.is_following:
            if payload:
                self._execute(decode_frame(payload))
            self._client.position += 1
        else:
            self._keep(decode_frame(payload))

    def _execute(self, frame: Frame) -> None:
        if frame.kind is not FrameKind.RECORD:
            raise DamageError(f"a {frame.kind.name} instead of a record")
        try:
            self._client.state.execute(frame)
        except (DamageError, MismatchError, KvpoolError):
            raise
        except BaseException:  # noqa: BLE001 - the process ends
            self._client.recorder.crash_after_bug("follow")

    def _keep(self, frame: Frame) -> None:
        """Keeps a frame of a snapshot, and loads the snapshot with the last one."""
        if frame.kind not in _SNAPSHOT_KINDS:
            raise DamageError(f"a {frame.kind.name} instead of a snapshot")
        self._snapshot.append(frame)
        if frame.kind is FrameKind.END:
            self._loading = asyncio.create_task(self._load(), name="load_snapshot")

    def _report(self) -> None:
        """Reports what was executed, once the journal has written the snapshot before it, or has given up."""
        position = self._client.position
        if self.is_following and position != self._executed and not self._client.state.journal.is_behind:
            self._executed = position
            self._client.driver.step(events.Executed(position))

    def _refused(self, error: KvpoolError) -> None:
        if self._client.is_new_failure(str(error)):
            _log.warning("refused by the primary", extra={"reason": error.reason, "error": str(error)})
        self.leave()

    def _welcomed(self, answer: messages.Welcome) -> None:
        client = self._client
        self.is_following = answer.resumes
        client.is_new_failure("")
        client.backoff.reset()
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
        self.data_received(b"")  # the frames that wait
        pools, sessions = client.state.state.pools, client.state.state.sessions
        _log.info("snapshot loaded", extra={"pools": len(pools), "sessions": len(sessions)})
